"""Optimizers made before sharding go on as if nothing had happened, on real ranks and stock torch sharding."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from optim_workers import Case, Result, clip, follow, scalar, spawn, spoiled
from rows import few

FSDP2, TP2 = (1, 2, 1), (1, 1, 2)
FSDP4, HSDP, BOTH = (1, 4, 1), (2, 2, 1), (1, 2, 2)
KINDS = [("adamw", "default"), ("adamw", "foreach"), ("adamw", "fused"), ("sgd", "foreach"), ("adagrad", "foreach")]

FOLLOW = [
    *(Case(degrees, "mlp", *kind, populated=True) for degrees in (FSDP2, TP2) for kind in KINDS),
    Case(FSDP2, "tied", "adamw", "fused", populated=True),
    Case(TP2, "tied", "adamw", "foreach", populated=True),
    *(Case(BOTH, "tied", *kind, populated=True) for kind in KINDS),
    Case(BOTH, "tied", "sgd", "default", populated=True),
    Case(BOTH, "tied", "adagrad", "default", populated=True),
    *(Case(BOTH, "tied", *kind, populated=False) for kind in KINDS[1:]),
    Case(BOTH, "mlp", "adamw", "foreach", populated=True),
    Case(BOTH, "tied", "adamw", "fused", populated=True, forward_first=True),
    Case(HSDP, "tied", "adamw", "foreach", populated=True),
    Case(HSDP, "mlp", "adamw", "fused", populated=False),
    Case(FSDP4, "mlp", "sgd", "foreach", populated=True),
]
SPOILED = [Case(FSDP2, "mlp", "adamw", "default", populated=False), Case(BOTH, "tied", "sgd", "foreach", False)]
SCALAR = Case(FSDP2, "mlp", "adamw", "foreach", populated=True)
CLIP = Case(BOTH, "tied", "adamw", "foreach", populated=False)

JOBS: list[tuple[Callable[[Case], Result], Case]] = [
    *((follow, case) for case in FOLLOW),
    *((spoiled, case) for case in SPOILED),
    (scalar, SCALAR),
    (clip, CLIP),
]
Results = Callable[[Callable[[Case], Result], Case], list[Result]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Run all jobs of one world size together: starting the ranks costs more than the jobs."""
    done: dict[int, list[dict[str, Result]]] = {}

    def of(job: Callable[[Case], Result], case: Case) -> list[Result]:
        world = case.degrees[0] * case.degrees[1] * case.degrees[2]
        if world not in done:
            # a failed start is not tried again for every test
            done[world] = []
            jobs = [(j, c) for j, c in JOBS if c.degrees[0] * c.degrees[1] * c.degrees[2] == world]
            done[world] = spawn(world, tmp_path_factory.mktemp(f"world{world}"), jobs)
        assert done[world], f"the {world} ranks did not finish: see the first test that used them"
        ranks = [rank[f"{job.__name__}-{case}"] for rank in done[world]]
        for rank in ranks:
            assert "error" not in rank, rank["error"]
        return ranks

    return of


@pytest.mark.parametrize("case", few(FOLLOW, [case for case in FOLLOW if case.degrees == BOTH]), ids=str)
def test_training_goes_on(results: Results, case: Case) -> None:
    ranks = results(follow, case)
    for rank in ranks:
        assert rank["parameters"] < 1e-6
        assert rank["state"] < 1e-6
        assert rank["state_when_cut"] == 0.0
        assert rank["names"] and rank["lr"] and rank["state_dict"]
        assert rank["stale"] == []
        assert rank["moment_bytes"] == rank["parameter_bytes"] < rank["full_bytes"]


@pytest.mark.parametrize("case", SPOILED, ids=str)
def test_without_restore_nothing_trains(results: Results, case: Case) -> None:
    for rank in results(spoiled, case):
        assert rank["moved"] == 0.0
        assert rank["stale_bytes"] == rank["full_bytes"]


def test_moments_of_a_scalar_are_sharded_and_its_step_is_not(results: Results) -> None:
    for rank in results(scalar, SCALAR):
        assert rank["sharded"] == ["exp_avg", "exp_avg_sq"]
        assert rank["step"] == 2


def test_clip_on_three_kinds_of_parameters(results: Results) -> None:
    for rank in results(clip, CLIP):
        assert rank["meshes"] == 3
        # torch's own function refuses this mix: the day it does not, ours can go
        assert rank["stock"]
        assert rank["plain"] and rank["equal"]
        assert rank["norm"] < 1e-6
        assert rank["gradients"] < 1e-6
