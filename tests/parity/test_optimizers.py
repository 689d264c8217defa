"""Training after sharding, with every kind of optimizer, against one process: ten losses, and parameters after."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import train_workers
from rows import few
from train_workers import BATCH, LENGTH, Case, build

import autoshard

CASES: dict[str, tuple[dict[str, int], list[Case]]] = {
    "2x2": (
        {"dp_shard": 2, "tp": 2},
        [
            Case("LBFGS"),
            Case("AdamW", "loop", "populated"),
            Case("AdamW", "fused", "after"),
            Case("Adam", "foreach", "populated"),
            Case("SGD", "foreach", "populated"),
            Case("Adagrad", "foreach", "populated"),
            Case("Muon", "foreach", "populated"),
        ],
    ),
    "4": (
        {"dp_shard": 4, "tp": 1},
        [Case("AdamW", "foreach"), Case("SGD"), Case("Adam", "fused", "populated"), Case("LBFGS")],
    ),
    "1x4": (
        {"dp_shard": 1, "tp": 4},
        [Case("AdamW", "fused", "populated"), Case("SGD", "foreach"), Case("Adagrad", "loop", "after"), Case("LBFGS")],
    ),
    "replicate 2 x tp 2": (
        {"dp_replicate": 2, "dp_shard": 1, "tp": 2},
        [Case("SGD", "foreach", "populated"), Case("Adam", "fused"), Case("Adagrad", "loop", "populated")],
    ),
    "2x2x2": ({"dp_replicate": 2, "dp_shard": 2, "tp": 2}, [Case("AdamW", "foreach", "populated")]),
}
KEPT = [(mesh, case) for mesh in ("2x2", "1x4") for case in CASES[mesh][1]]
# Muon computes in bfloat16 inside torch: another order of the same sums changes the third digit of its steps
MUON_LOSS, MUON_PARAMETERS = 1e-3, 1e-2

Results = Callable[[str], list[dict[str, dict[str, Any]]]]


def made(degrees: dict[str, int]) -> Any:
    world = 1
    for degree in degrees.values():
        world *= degree
    ids = torch.zeros(BATCH, LENGTH, dtype=torch.long)
    return autoshard.plan(build(), world=world, example_inputs=(ids,), **degrees)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def results(gloo: Any) -> Results:
    """Run all cases of a mesh as one job."""
    done: dict[str, list[dict[str, dict[str, Any]]]] = {}

    def of(mesh: str) -> list[dict[str, dict[str, Any]]]:
        if mesh not in done:
            degrees, cases = CASES[mesh]
            plan = made(degrees)
            # many cases in one job, and more ranks than most machines have cores
            done[mesh] = gloo(plan.mesh.world).run(train_workers.train, plan.to_dict(), cases, limit=300.0)
        return done[mesh]

    return of


@pytest.mark.parametrize(
    ("mesh", "case"), few(((m, c) for m, (_, cases) in CASES.items() for c in cases), KEPT), ids=str
)
def test_training_equals_one_process(results: Results, mesh: str, case: Case) -> None:
    for rank in results(mesh):
        got = rank[str(case)]
        assert got["loss"] < (MUON_LOSS if case.kind == "Muon" else 1e-6)
        assert got["parameters"] < (MUON_PARAMETERS if case.kind == "Muon" else 1e-6)
        assert got["moved"] > 1e-3
        assert got["alive"] == 0
        assert got["same groups"]


@pytest.mark.parametrize(
    ("mesh", "case"), few(((m, c) for m, (_, cases) in CASES.items() for c in cases), KEPT), ids=str
)
def test_state_is_cut_with_the_parameters(results: Results, mesh: str, case: Case) -> None:
    degrees, _ = CASES[mesh]
    cut = degrees["dp_shard"] * degrees["tp"]
    for rank in results(mesh):
        got = rank[str(case)]
        if case.kind == "LBFGS":  # its history is one vector of all parameters
            assert got["state"] == got["full state"]
        else:  # what is not cut over tp is norms and biases
            assert got["full state"] / cut <= got["state"] < got["full state"] / cut * 1.2


def test_an_optimizer_made_on_meta_trains(gloo: Any) -> None:
    plan = made({"dp_shard": 2, "tp": 2})
    for answer in gloo(4).run(train_workers.from_meta, plan.to_dict()):
        assert answer["held"] == answer["names"]
        assert answer["parameters"] < 1e-6


def test_an_optimizer_of_somebody_else(gloo: Any) -> None:
    plan = made({"dp_shard": 2, "tp": 2}).to_dict()
    # a sign may turn where a momentum is zero but for rounding: the mean tells, not the largest
    assert max(gloo(4).run(train_workers.somebody_elses, plan)) < 1e-5
    for text in gloo(4).run(train_workers.refused, plan, "raw"):
        assert "ReadsMemory does not work on sharded parameters" in text and "raw memory" in text
    for text in gloo(4).run(train_workers.refused, plan, "adafactor"):
        assert "Adafactor does not work on sharded parameters" in text and "AdamW" in text
