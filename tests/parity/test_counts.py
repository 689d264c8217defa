"""Collectives that a step really starts, counted by axis on the fake process group, against what the plan says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from counting import both, planned, predicted, trainable
from rows import few

from autoshard.passes import traffic
from autoshard.plans import AXES

#: a model, a mesh (dp_replicate, dp_shard, tp) and options; ``benchmarks/collectives.py`` counts many more
STEPS: list[tuple[str, tuple[int, int, int], dict[str, Any]]] = [
    ("decoder", (1, 8, 1), {}),
    ("decoder", (8, 1, 1), {"checkpointing": "full"}),
    ("decoder", (1, 1, 4), {"sequence_parallel": True}),
    ("decoder", (4, 64, 4), {"checkpointing": "full", "sequence_parallel": True}),
    ("residual inside", (1, 1, 2), {}),
    ("llama", (4, 1, 2), {}),
    ("llama", (2, 4, 2), {"checkpointing": "selective"}),
    ("llama", (2, 4, 2), {"reshard": False}),
    ("llama", (16, 32, 2), {"checkpointing": "full", "sequence_parallel": True}),
    ("qwen3", (1, 1, 2), {"checkpointing": "full"}),
    ("qwen3", (1, 32, 2), {}),
    ("gemma2", (16, 8, 1), {}),
    ("gemma2", (1, 4, 2), {"checkpointing": "full"}),
    ("gemma2", (1, 32, 2), {"sequence_parallel": True}),
    ("head norms", (1, 1, 2), {"checkpointing": "full", "sequence_parallel": True}),
    ("head norms", (4, 64, 4), {}),
    ("tied", (1, 32, 2), {"checkpointing": "full"}),
    ("nano", (1, 4, 4), {"checkpointing": "full"}),
    ("head norms", (2, 4, 2), {"mixed_precision": "bfloat16", "sequence_parallel": True}),
    ("llama", (2, 4, 2), {"masters": "float32"}),
    ("head norms", (1, 4, 2), {"mixed_precision": "bfloat16", "tp_reduce_dtype": "float32"}),
    ("head norms", (1, 1, 2), {"sequence_parallel": True, "checkpointing": "full", "tp_reduce_dtype": "bfloat16"}),
]


def named(part: Any) -> str:
    return "-".join(f"{key}={value}" for key, value in part.items()) if isinstance(part, dict) else str(part)


@pytest.mark.parametrize(("name", "mesh", "options"), few(STEPS, 14), ids=named)
def test_a_step_sends_what_the_plan_says(name: str, mesh: tuple[int, int, int], options: dict[str, Any]) -> None:
    said, sent = both(name, mesh, torch.bfloat16 if "masters" in options else torch.float32, **options)
    assert sent == said
    assert {axis for axis, _ in sent} == {axis for axis, degree in zip(AXES, mesh, strict=True) if degree > 1}


def test_a_dense_layer_costs_four_all_reduces() -> None:
    # two layers, and beside them the embedding's sum and the entry of the head; a gather of logits
    _, sent = both("llama", (1, 1, 2))
    reduces, tokens = 4 * 2 + 2, 2 * 8
    assert sent == {
        ("tp", "all_reduce"): (reduces, reduces * tokens * 32 * 4),
        ("tp", "all_gather"): (1, tokens * 64 * 4),
    }


def test_masters_are_gathered_narrow_and_reduced_wide() -> None:
    _, plain = both("llama", (2, 4, 1), torch.bfloat16)
    _, wide = both("llama", (2, 4, 1), torch.bfloat16, masters="float32")
    assert wide["dp_shard", "all_gather"] == plain["dp_shard", "all_gather"]
    for row in (("dp_shard", "reduce_scatter"), ("dp_replicate", "all_reduce")):
        count, size = plain[row]
        assert wide[row] == (count, 2 * size)


# --- a prediction that is wrong is found ---


@pytest.mark.parametrize(("kind", "sends"), [("P->R", (None, None)), ("R->V", ("all_reduce", "all_reduce"))])
def test_a_conversion_that_is_predicted_to_send_otherwise(kind: str, sends: tuple[str | None, str | None]) -> None:
    with mock.patch.dict(traffic.SENDS, {kind: sends}):
        said, sent = both("decoder", (1, 1, 2))
    assert said != sent


def test_a_row_that_is_left_out_or_doubled() -> None:
    mesh = (2, 4, 2)
    said, sent = both("head norms", mesh)
    assert said == sent
    plan = planned(trainable("head norms", torch.float32), mesh)
    rows = plan.collectives
    assert {row.what for row in rows} == {"activation", "parameter", "gradient", "gradient sum"}
    for what in {row.what for row in rows}:
        without = replace(plan, collectives=tuple(row for row in rows if row.what != what))
        twice = replace(plan, collectives=(*rows, *(row for row in rows if row.what == what)))
        assert predicted(without) != sent and predicted(twice) != sent


def test_a_block_that_is_said_to_send_once_and_runs_twice() -> None:
    with mock.patch.object(traffic, "_again", lambda *_: False):
        said, sent = both("decoder", (1, 1, 2), checkpointing="full")
    assert sent["tp", "all_reduce"][0] - said["tp", "all_reduce"][0] == 2
