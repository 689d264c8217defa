"""Collectives that a step really starts, counted on the fake process group, against what the plan says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from model_workers import tokens
from models import build, token_loss
from simulate import CountCollectives, fake_world

from autoshard.api import plan as make_plan
from autoshard.executor.execute import apply, make_mesh

IDS = torch.zeros(2, 7, dtype=torch.long)


def counted(name: str, tp: int = 2, **degrees: int) -> tuple[Any, CountCollectives]:
    """Plan a model, apply the plan on a fake group, and count the second step."""
    model = build(name)
    given = {"input_ids": IDS} if hasattr(model, "config") else (IDS,)
    world = tp * degrees.get("dp_shard", 1) * degrees.get("dp_replicate", 1)
    plan = make_plan(model, world=world, tp=tp, example_inputs=given, batch=2, sequence=7, **degrees)  # type: ignore[arg-type]
    ids = tokens(model, 2, 7, seed=0)
    with fake_world(world):
        apply(model, plan, make_mesh(plan, "cpu"))
        token_loss(model(ids), ids).backward()
        with CountCollectives() as seen:
            token_loss(model(ids), ids).backward()
    return plan, seen


@pytest.mark.parametrize("name", ["decoder", "residual inside", "head norms", "tied", "llama", "qwen3", "gemma2"])
def test_counts_and_bytes_over_tp_are_the_plans(name: str) -> None:
    plan, seen = counted(name)
    reduces = [c for c in plan.collectives if c.op == "all_reduce"]
    gathers = [c for c in plan.collectives if c.op == "all_gather"]
    assert seen.count("allreduce_") == sum(c.count for c in reduces)
    assert sum(n for op, n in seen.seen if op == "allreduce_") * 8 == sum(c.bytes for c in reduces)
    assert seen.count("_allgather_base_") == sum(c.count for c in gathers)


def test_a_dense_layer_costs_four_all_reduces() -> None:
    _, seen = counted("llama")
    # two layers, and beside them the embedding's sum and the entry of the head
    assert seen.count("allreduce_") == 4 * 2 + 2


def test_fsdp_gathers_and_scatters_are_the_plans() -> None:
    plan, seen = counted("head norms", dp_shard=2)
    data = {c.op: c.count for c in plan.collectives if c.axis == "dp_shard"}
    tp = {c.op: c.count for c in plan.collectives if c.axis == "tp" and c.op == "all_gather"}
    assert seen.count("_allgather_base_") == data["all_gather"] + tp["all_gather"]
    assert seen.count("_reduce_scatter_base_") == data["reduce_scatter"]
