"""Bytes on each rank: what sharding leaves alive, and the most that is alive while it works."""

from __future__ import annotations

from typing import Any

import memory_workers
import pytest
import torch
from memory_workers import BATCH, LENGTH, OPTIMIZERS, WAYS, build
from rows import few

import autoshard

MESHES = {"4": {"dp_shard": 4, "tp": 1}, "2x2": {"dp_shard": 2, "tp": 2}}
SLACK = 64  # a step count of 4 bytes for each of a few parameters, and what FSDP keeps per group


def made(mesh: str, trained: str = "adamw") -> Any:
    ids = torch.zeros(BATCH, LENGTH, dtype=torch.long)
    options = OPTIMIZERS[trained][0]
    return autoshard.plan(build(trained), world=4, example_inputs=(ids,), **MESHES[mesh], **options)  # type: ignore[arg-type]


def measured(gloo: Any, plan: Any, when: str, start: str, compare: bool = True, trained: str = "adamw") -> list[Any]:
    answers: list[Any] = gloo(4).run(memory_workers.measure, plan.to_dict(), when, start, compare, trained)
    return answers


@pytest.mark.parametrize("mesh", few(MESHES, ["4"]))
@pytest.mark.parametrize("when", ["before"])
def test_from_meta_the_peak_is_the_share_and_one_unit(gloo: Any, mesh: str, when: str) -> None:
    plan = made(mesh)
    largest = max(unit.parameter_bytes for unit in plan.units)
    for got in measured(gloo, plan, when, "meta"):
        assert got["peak"] <= plan.memory_bytes["parameters"] + largest < got["full"] / 2
        assert got["after the call"] <= plan.memory_bytes["parameters"] + SLACK
        assert got["trains"]


@pytest.mark.parametrize("mesh", few(MESHES, ["2x2"]))
@pytest.mark.parametrize("when", few(["before", "populated"], ["populated"]))
def test_nothing_of_the_full_model_is_left(gloo: Any, mesh: str, when: str) -> None:
    plan = made(mesh)
    largest = max(unit.parameter_bytes for unit in plan.units)
    for got in measured(gloo, plan, when, "cpu", compare=False):
        assert got["stale"] == 0
        assert got["trains"]
        assert not [text for text in got["said"] if "still holds" in text]
        for kind in ("parameters", "gradients", "optimizer"):
            assert got[kind] == plan.memory_bytes[kind]
        held = plan.memory_bytes["parameters"] * (3 if when == "populated" else 1)
        assert got["after the call"] <= held + 8 * len(plan.parameters) + SLACK
        # no second full copy at any time
        assert got["peak"] <= got["before the call"] + largest + SLACK


@pytest.mark.parametrize(("trained", "mesh"), few([("sgd", "4"), ("sgd-momentum", "4"), ("masters", "2x2")], 1))
def test_what_the_optimizer_and_the_precision_take_is_predicted(gloo: Any, mesh: str, trained: str) -> None:
    plan, plain = made(mesh, trained), made(mesh)
    for got in measured(gloo, plan, "after", "cpu", compare=False, trained=trained):
        assert got["trains"]
        predicted = {kind: plan.memory_bytes[kind] for kind in ("parameters", "gradients", "optimizer")}
        assert {kind: got[kind] for kind in predicted} == predicted
    times = {"sgd": 0, "sgd-momentum": 1, "masters": 2}[trained]
    assert plan.memory_bytes["optimizer"] == times * plain.memory_bytes["gradients"]


def test_an_optimizer_that_is_not_given_keeps_the_whole_model_and_trains_nothing(gloo: Any) -> None:
    assert WAYS["made before, not given"] == "forgotten"
    plan = made("4")
    for got in measured(gloo, plan, "forgotten", "cpu"):
        assert got["stale"] == got["full"]
        (said,) = [text for text in got["said"] if "still holds" in text]
        assert "AdamW still holds" in said and "will train nothing" in said
        assert got["optimizer"] == 0
        assert not got["trains"]
