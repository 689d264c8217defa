"""What lives around an optimizer works on a sharded model as in one process, or is refused with what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import around_workers as jobs
import pytest
import torch
from rows import few
from spawn import Pool

import autoshard
from autoshard.plans import Mesh

Gloo = Callable[[int], Pool]
TOLERANCE = 1e-9
TP, FSDP, BOTH = Mesh(1, 1, 2), Mesh(1, 2, 1), Mesh(1, 2, 2)
each_mesh = pytest.mark.parametrize("mesh", [TP, FSDP, BOTH], ids=["tp", "fsdp", "fsdp-tp"])
two_meshes = pytest.mark.parametrize("mesh", [TP, BOTH], ids=["tp", "fsdp-tp"])


@pytest.mark.parametrize(
    ("mesh", "how"),
    few([(TP, {"foreach": True}), (TP, {"fused": True}), (FSDP, {"fused": True}), (BOTH, {"foreach": True})], 3),
    ids=["tp-foreach", "tp-fused", "fsdp-fused", "fsdp-tp-foreach"],
)
def test_an_overflow_on_one_rank_skips_every_ranks_step(gloo: Gloo, mesh: Mesh, how: dict[str, Any]) -> None:
    answers = gloo(mesh.world).run(jobs.overflow_on_one_rank, autoshard.GradScaler, mesh, how)
    assert len({answer["norm"] for answer in answers}) == 1
    for answer in answers:
        assert answer["parameters"] < 1e-5
        assert answer["moved"] == 0.0
        assert answer["scale"] == 2.0**9


def test_torchs_own_scaler_lets_the_ranks_part(gloo: Gloo) -> None:
    # the day this fails, ours can go
    answers = gloo(2).run(jobs.overflow_on_one_rank, torch.amp.GradScaler, TP, {"foreach": True})
    assert [answer["moved"] > 0 for answer in answers] == [True, False]
    assert [answer["scale"] for answer in answers] == [2.0**10, 2.0**9]


@pytest.mark.parametrize(
    ("mesh", "early"), few([(TP, True), (TP, False), (BOTH, True)], 2), ids=["tp-before", "tp-after", "fsdp-tp-before"]
)
def test_a_scheduler_made_before_or_after(gloo: Gloo, mesh: Mesh, early: bool) -> None:
    for report, same_rate in gloo(mesh.world).run(jobs.scheduled, mesh, early):
        assert report.worst < TOLERANCE, report
        assert same_rate


@two_meshes
@pytest.mark.parametrize("set_to_none", [True, False], ids=["dropped", "zeroed"])
def test_zero_grad(gloo: Gloo, mesh: Mesh, set_to_none: bool) -> None:
    assert gloo(mesh.world).run(jobs.zeroed, mesh, set_to_none)[0].worst < TOLERANCE


@two_meshes
def test_an_average_of_weights(gloo: Gloo, mesh: Mesh) -> None:
    for report, said in gloo(mesh.world).run(jobs.averaged, mesh):
        assert report.worst < TOLERANCE, report
        if mesh.data > 1:
            assert all("cannot be deep-copied\n help: copy it before it is parallelized" in one for one in said)
        else:
            assert said == ["nothing", "nothing"]


@pytest.mark.parametrize("mesh", [TP, FSDP], ids=["tp", "fsdp"])
def test_statistics_of_batch_norms(gloo: Gloo, mesh: Mesh) -> None:
    assert max(gloo(2).run(jobs.batch_norm, mesh)) < TOLERANCE


@each_mesh
def test_a_param_group_added_later(gloo: Gloo, mesh: Mesh) -> None:
    report = gloo(mesh.world).run(jobs.unfrozen, mesh)[0]
    assert report.worst < TOLERANCE, report


def test_unfreezing_what_was_planned_frozen_is_refused(gloo: Gloo) -> None:
    for said in gloo(2).run(jobs.planned_frozen, TP):
        assert said.startswith("InvalidArgument: a parameter takes a gradient that was frozen when it was planned")
        assert "at: blocks.0.attention.q_norm.weight" in said
    assert gloo(2).run(jobs.planned_frozen, FSDP) == ["nothing", "nothing"]


@each_mesh
def test_an_optimizer_that_steps_in_backward(gloo: Gloo, mesh: Mesh) -> None:
    report = gloo(mesh.world).run(jobs.stepping_in_backward, mesh)[0]
    assert report.worst < TOLERANCE, report


@two_meshes
def test_hooks_on_gradients(gloo: Gloo, mesh: Mesh) -> None:
    for report, said in gloo(mesh.world).run(jobs.halving, mesh):
        if mesh.data > 1:
            assert said.startswith("InvalidArgument: 1 gradient hook would never run")
            assert "register_post_accumulate_grad_hook" in said
        else:
            assert report.worst < TOLERANCE, report


@two_meshes
def test_clipping_by_value(gloo: Gloo, mesh: Mesh) -> None:
    for error, said in gloo(mesh.world).run(jobs.clipped_by_value, mesh):
        assert error < TOLERANCE
        assert said.startswith("InvalidArgument: a gradient is a partial sum on each rank")


@two_meshes
def test_states_of_what_lives_around(gloo: Gloo, mesh: Mesh) -> None:
    assert gloo(mesh.world).run(jobs.saved_and_loaded, mesh)[0].worst < TOLERANCE
