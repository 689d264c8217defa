"""Options of ``parallelize`` against one process without them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import training_workers as jobs
from rows import few
from spawn import Pool

from autoshard.executor.training import Training
from autoshard.plans import Mesh

Gloo = Callable[[int], Pool]
TOLERANCE = 1e-9
TP, FSDP, BOTH, HSDP = Mesh(1, 1, 2), Mesh(1, 2, 1), Mesh(1, 2, 2), Mesh(2, 2, 1)
# a rounding step of bfloat16: results of long sums of rounded numbers stay within a few of them
EPSILON = torch.finfo(torch.bfloat16).eps


@pytest.mark.parametrize(
    ("mesh", "training"),
    few(
        [
            (TP, Training(checkpointing="selective")),
            (FSDP, Training(offload=True)),
            (BOTH, Training(checkpointing="full")),
            *((mesh, Training(checkpointing="full")) for mesh in (TP, FSDP)),
            (BOTH, Training(checkpointing="selective")),
            (TP, Training(offload=True)),
            (BOTH, Training(offload=True, checkpointing="selective")),
        ],
        3,
    ),
    ids=lambda one: f"{one.checkpointing}, offload={one.offload}" if isinstance(one, Training) else str(one),
)
def test_what_changes_no_number(gloo: Gloo, mesh: Mesh, training: Training) -> None:
    for report, facts in gloo(mesh.world).run(jobs.exact, mesh, training):
        assert report.worst < TOLERANCE, report
        # with one data rank only FSDP can offload: it is used over that one
        assert facts["fsdp"] == (mesh.data > 1 or training.offload)


@pytest.mark.parametrize(
    ("mesh", "checkpointing"), few([(TP, "selective"), (FSDP, "full"), (BOTH, "none")], 2), ids=str
)
def test_compiled_blocks(gloo: Gloo, mesh: Mesh, checkpointing: str) -> None:
    training = Training(checkpointing=checkpointing, compile=True, compile_backend="aot_eager")
    for report, facts in gloo(mesh.world).run(jobs.exact, mesh, training, layers=1):
        assert report.worst < TOLERANCE, report
        assert facts["graphs"] > 0


def test_checkpointing_recomputes_what_it_says(gloo: Gloo) -> None:
    found = gloo(2).run(jobs.flops, TP)[0]
    calls = {mode: count for mode, (_, count) in found.items()}
    flops = {mode: count for mode, (count, _) in found.items()}
    assert calls == {"none": 1, "selective": 2, "full": 2}
    # matmuls and attention are not run again
    assert flops["none"] == flops["selective"] < flops["full"]


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_copies_and_pickles_recompute_on_their_own(gloo: Gloo, mode: str) -> None:
    assert max(gloo(2).run(jobs.copies, TP, mode)[0]) < TOLERANCE


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_dropout_is_drawn_once(gloo: Gloo, mode: str) -> None:
    for error, _ in gloo(2).run(jobs.dropout, TP, mode):
        assert error < TOLERANCE


@pytest.mark.parametrize(
    ("mesh", "precision"),
    few([(TP, "bfloat16"), (FSDP, "bfloat16"), (TP, "policy"), (BOTH, "bfloat16"), (FSDP, "with the rest")], 3),
    ids=str,
)
def test_mixed_precision(gloo: Gloo, mesh: Mesh, precision: str) -> None:
    given: Any = jobs.policy() if precision == "policy" else "bfloat16"
    rest = precision == "with the rest"
    training = Training(given, offload=rest, checkpointing="full" if rest else "none")
    for answer in gloo(mesh.world).run(jobs.mixed, mesh, training):
        assert answer["seen"] == {torch.bfloat16}
        assert answer["held"] == {torch.float32}
        # partial gradients wait for the sum over tp in the dtype of reductions
        assert answer["kept"] == ({torch.float32} if mesh.tp > 1 else set())
        assert answer["scaled"] < 4 * EPSILON
        # a gradient that is nearly cancelled has fewer digits; one summed over too few ranks is off by half or more
        assert answer["own"] < 0.3
        assert answer["loss"] < 4 * EPSILON


def test_what_is_refused(gloo: Gloo) -> None:
    first, second = gloo(2).run(jobs.refused, TP)
    assert first["narrow"].startswith("InvalidArgument: mixed_precision='bfloat16' trains float32 parameters, and 37")
    assert first["no blocks"].startswith("InvalidArgument: checkpointing works block by block, and the plan has none")
    assert first["compile"].startswith("InvalidArgument: compile works block by block")
    assert first["differ"] == second["differ"]
    assert first["differ"].startswith("RanksDisagree: 1 of 2 ranks have other options than rank 0")


@pytest.mark.parametrize(("mesh", "empty"), [(FSDP, False), (BOTH, False), (HSDP, False), (FSDP, True)], ids=str)
def test_mean_over_tokens(gloo: Gloo, mesh: Mesh, empty: bool) -> None:
    answers = gloo(mesh.world).run(jobs.tokens, mesh, empty)
    assert len({answer["count"] for answer in answers}) > 1
    assert len({answer["loss"] for answer in answers}) == 1
    for answer in answers:
        assert answer["value"] < TOLERANCE
        assert answer["gradients"] < TOLERANCE
        # the mean of means is what users write, and is another loss
        assert answer["naive"] > 1e-2


def test_no_token_anywhere(gloo: Gloo) -> None:
    assert gloo(2).run(jobs.no_tokens, FSDP) == [(0.0, 0.0)] * 2


@pytest.mark.parametrize("mesh", [TP, HSDP, Mesh(2, 1, 2)], ids=str)
def test_shares_of_the_data(gloo: Gloo, mesh: Mesh) -> None:
    answers = gloo(mesh.world).run(jobs.shares, mesh)
    assert [(rank, world) for rank, world, _ in answers] == [(r // mesh.tp, mesh.data) for r in range(mesh.world)]
    by_share = {rank: seen for rank, _, seen in answers}
    assert all(seen == by_share[rank] for rank, _, seen in answers)
    assert sorted(i for seen in by_share.values() for i in seen) == list(range(8))


def test_all_options_from_the_top(gloo: Gloo) -> None:
    answers = gloo(2).run(jobs.from_the_top, TP)
    assert len({tuple(answer["losses"]) for answer in answers}) == 1
    for answer in answers:
        assert answer["losses"][-1] < 0.8 * answer["losses"][0]
        assert answer["wrapped"] == ["Recomputed", "Recomputed"]
        assert answer["calls"] == 6
