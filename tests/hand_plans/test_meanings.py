"""The reader of hand plans against a second table of what the style names mean, on types that use them all."""

from __future__ import annotations

from dataclasses import replace

import hand_meanings
import pytest
from hand_meanings import STYLES, WHOLE, differences
from zoo.tiny import build

from autoshard.hand import styles
from autoshard.hand.reader import from_hand

#: Dense, packed, experts, latent attention, bare parameters, norms over heads, biases.
TYPES = """
qwen3 phi3 mixtral gpt_oss deepseek_v2 longcat_flash gpt_neox glm apertus flex_olmo aria_text
""".split()


@pytest.mark.parametrize("model_type", TYPES)
def test_the_reader_cuts_what_the_names_mean(model_type: str) -> None:
    model = build(model_type, device="meta")
    assert differences(from_hand(model, model.tp_plan, 2).plan, model.tp_plan) == []


def test_the_types_use_every_name_that_cuts_or_sums() -> None:
    used = {style for model_type in TYPES for style in build(model_type, device="meta").tp_plan.values()}
    assert {name for name in STYLES if STYLES[name] != WHOLE} <= used


@pytest.mark.parametrize("name", ["colwise", "rowwise", "packed_colwise"])
def test_another_meaning_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("mixtral", device="meta")
    turned = replace(styles.STYLES[name], matrix=-3 - (styles.STYLES[name].matrix or 0))
    monkeypatch.setitem(styles.STYLES, name, turned)
    assert differences(from_hand(model, model.tp_plan, 2).plan, model.tp_plan)


def test_both_tables_know_the_same_names() -> None:
    assert set(STYLES) <= set(styles.STYLES)
    assert all(hand_meanings.STYLES[name].summed == styles.STYLES[name].summed for name in STYLES)
