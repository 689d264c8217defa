"""A bfloat16 model trains on float32 masters as in one process, and no rank ever holds it whole in float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import masters_workers as jobs
import memory_workers
import pytest
import torch
from rows import few
from spawn import Pool

import autoshard
from autoshard.executor.training import PLAIN, Training
from autoshard.plans import Mesh

Gloo = Callable[[int], Pool]
TP, FSDP, BOTH = Mesh(1, 1, 2), Mesh(1, 2, 1), Mesh(1, 2, 2)
MASTERS = jobs.MASTERS
EPSILON = 2.0**-7  # of bfloat16: one rounding of a value


@pytest.mark.parametrize(
    ("kind", "mesh", "training"),
    few(
        [
            ("decoder", TP, MASTERS),
            ("decoder", FSDP, MASTERS),
            ("parts", TP, MASTERS),
            ("decoder", FSDP, Training("bfloat16", masters=torch.float32, offload=True, checkpointing="full")),
            ("parts", BOTH, MASTERS),
        ],
        3,
    ),
    ids=str,
)
def test_small_steps_count(gloo: Gloo, kind: str, mesh: Mesh, training: Training) -> None:
    for got in gloo(mesh.world).run(jobs.trained, kind, mesh, training):
        assert got["held"] == got["state"] == got["saved"] == {torch.float32}
        assert got["frozen"] == ({torch.bfloat16} if kind == "decoder" else set())
        assert got["sharded"] and got["buffers"]
        assert got["seen"] == {torch.bfloat16}
        assert got["scalars"] == ({torch.bfloat16} if kind == "decoder" else set())
        # sums over tp round in other places: no further apart than bfloat16 is from float32
        assert got["error"] < (EPSILON if mesh.tp == 1 else 1.5 * got["rounding"]), got
        assert got["error"] < 0.2


@pytest.mark.parametrize("mesh", [TP, FSDP], ids=["tp", "fsdp"])
def test_without_masters_small_steps_are_lost(gloo: Gloo, mesh: Mesh) -> None:
    for got in gloo(2).run(jobs.trained, "decoder", mesh, PLAIN):
        assert got["held"] == got["state"] == {torch.bfloat16}
        assert got["error"] > 0.95, got


@pytest.mark.parametrize(("kind", "mesh"), [("decoder", FSDP), ("parts", TP)], ids=str)
def test_bfloat16_moments_become_float32(gloo: Gloo, kind: str, mesh: Mesh) -> None:
    for error, dtypes, count in gloo(2).run(jobs.populated, kind, mesh):
        assert error == 0.0
        assert dtypes == {torch.float32}
        assert count > 10


@pytest.mark.parametrize("mesh", few([{"tp": 2}, {"tp": 1, "dp_shard": 2}], 1), ids=["tp", "fsdp"])
def test_no_float32_tensor_of_full_size(gloo: Gloo, mesh: dict[str, Any]) -> None:
    ids = torch.zeros(memory_workers.BATCH, memory_workers.LENGTH, dtype=torch.long)
    plan = autoshard.plan(memory_workers.build().to(torch.bfloat16), 2, example_inputs=(ids,), **mesh)
    largest = max(unit.parameter_bytes for unit in plan.units)
    for got in gloo(2).run(jobs.bytes_of, plan.to_dict(), "cpu", {"masters": torch.float32}):
        assert got["in the call"] == got["widest"] == got["largest shard"]
        # a rank may hold less than the plan says of the one that holds most
        assert 0.99 * 2 * plan.memory_bytes["parameters"] < got["held"] <= 2 * plan.memory_bytes["parameters"]
        assert got["after"] <= got["held"] + 1024
        assert got["peak"] <= got["full"] + 2 * largest, (got, largest)
    for got in gloo(2).run(jobs.bytes_of, plan.to_dict(), "meta", {"masters": torch.float32}):
        assert got["in the call"] == 0
        assert got["widest"] == got["largest shard"]
        assert got["peak"] <= got["held"] + 1024
    wide = autoshard.plan(memory_workers.build(), 2, example_inputs=(ids,), **mesh)
    for got in gloo(2).run(jobs.bytes_of, wide.to_dict(), "cpu", {"mixed_precision": "bfloat16"}, True):
        assert got["in the call"] > 1.9 * got["largest shard"]
        assert got["peak"] >= 2 * got["full"]


@pytest.mark.parametrize(("mesh", "training"), [(TP, PLAIN), (FSDP, MASTERS)], ids=str)
def test_what_was_made_on_an_optimizer_survives(gloo: Gloo, mesh: Mesh, training: Training) -> None:
    for got in gloo(2).run(jobs.survived, mesh, training):
        assert got["calls"] == ["pre", "post", "pre", "post", "saved"]
        assert got["rates"] == [[0.005, 0.0005], [0.0025, 0.00025]]
        assert got["same groups"] and got["same shapes"] and got["the model's"]
        assert got["moved"] > 10
