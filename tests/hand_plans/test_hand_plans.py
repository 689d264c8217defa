"""The inferred plans against the plans that transformers ships, parameter by parameter, by meaning."""

from __future__ import annotations

import pytest
from hand_meanings import differences
from models import hf
from rows import few

from autoshard.api import plan as make_plan


@pytest.mark.parametrize("kind", few(["Llama", "Qwen3", "Gemma2", "Mistral"], 3))
@pytest.mark.parametrize("tied", [False, True])
def test_inferred_cut_is_what_the_hand_plan_means(kind: str, tied: bool) -> None:
    model = hf(kind, tie_word_embeddings=tied)
    hand: dict[str, str] = model.tp_plan  # type: ignore[assignment]
    assert hand["model.embed_tokens"] == "embedding_rowwise"  # implicit in transformers: named nowhere in its tables
    assert hand["lm_head"] == "colwise_gather_output"
    assert differences(make_plan(model, world=2, tp=2), hand) == []


def test_a_parting_is_seen() -> None:
    model = hf("Qwen3")
    hand: dict[str, str] = dict(model.tp_plan)  # type: ignore[arg-type]
    hand["model.layers.*.self_attn.q_norm"] = "colwise"
    del hand["model.layers.*.mlp.down_proj"]
    found = differences(make_plan(model, world=2, tp=2), hand)
    assert len(found) == 4
    assert "q_norm" in found[0]
