"""Random numbers on real ranks: different over tp for a share, the same for what is whole, different over data."""

from __future__ import annotations

from collections.abc import Callable

import drawing_workers as jobs
import pytest
import torch
from drawing_workers import Masks
from spawn import Pool

from autoshard.plans import Mesh

TP, BOTH = Mesh(1, 1, 2), Mesh(1, 2, 2)
Gloo = Callable[[int], Pool]

#: Of the five uses of dropout in a block, in order, those on a rank's share: attention weights and hidden units.
SHARES = [False, True, False, True, False] * 2


def same(some: Masks, others: Masks) -> list[bool]:
    return [torch.equal(a, b) for a, b in zip(some, others, strict=True)]


@pytest.mark.parametrize("mesh", [TP, BOTH], ids=str)
def test_where_ranks_draw_alike(gloo: Gloo, mesh: Mesh) -> None:
    answers = gloo(mesh.world).run(jobs.drawn, mesh, steps=2)
    for rank in range(0, mesh.world, 2):
        (data, mine), (other_data, others) = answers[rank], answers[rank + 1]
        assert data == other_data == rank // 2
        for step in range(2):
            assert same(mine[step], others[step]) == [not share for share in SHARES]
        assert not any(same(mine[0], mine[1]))
    if mesh.data == 2:
        assert not any(same(answers[0][1][0], answers[2][1][0]))


@pytest.mark.parametrize("spoil", ["per_rank", "shared"])
def test_a_spoiled_plan_draws_otherwise(gloo: Gloo, spoil: str) -> None:
    (_, mine), (_, others) = gloo(2).run(jobs.drawn, TP, spoil)
    wanted = [not share for share in SHARES]
    assert same(mine[0], others[0]) != wanted
    if spoil == "per_rank":
        assert all(same(mine[0], others[0]))


def test_ranks_that_drew_differently_before_are_brought_together(gloo: Gloo) -> None:
    answers = gloo(4).run(jobs.seeded_apart, BOTH)
    assert answers[0] == answers[1] != answers[2] == answers[3]


@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
def test_training_equals_one_process_that_drops_the_same_places(gloo: Gloo, checkpointing: str) -> None:
    for errors in gloo(2).run(jobs.trained, TP, checkpointing):
        assert {name: error for name, error in errors.items() if not error < 1e-9} == {}
