"""A plan applied on gloo ranks against the untouched model: outputs, loss, every gradient, optimizer steps."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import workers
from executor_models import Config, Report
from rows import few
from spawn import Pool

from autoshard.plans import Mesh

TOLERANCE = 1e-9
TENSOR_PARALLEL = Mesh(1, 1, 2)
WITH_FSDP = Mesh(1, 2, 2)

Gloo = Callable[[int], Pool]


def exact(report: Report) -> bool:
    return report.worst < TOLERANCE


@pytest.mark.parametrize(
    "mesh",
    few(
        [
            Mesh(1, 1, 2),
            Mesh(1, 2, 1),
            Mesh(2, 1, 1),
            Mesh(1, 2, 2),
            Mesh(1, 1, 4),
            Mesh(2, 1, 2),
            Mesh(2, 2, 1),
        ],
        4,
    ),
    ids=str,
)
def test_trains_as_the_untouched_model(gloo: Gloo, mesh: Mesh) -> None:
    config = Config(layers=2 if mesh in (TENSOR_PARALLEL, WITH_FSDP) else 1)
    for report in gloo(mesh.world).run(workers.parity, config, mesh):
        assert exact(report), report


@pytest.mark.parametrize("how", ["grad_sum", "enter"])
def test_a_spoiled_plan_has_wrong_gradients_only(gloo: Gloo, how: str) -> None:
    report = gloo(2).run(workers.spoiled, TENSOR_PARALLEL, how)[0]
    assert report.outputs < TOLERANCE
    assert max(report.gradients.values()) > 1e-2


def test_a_bias_read_on_every_rank_is_added_twice(gloo: Gloo) -> None:
    assert gloo(2).run(workers.spoiled, TENSOR_PARALLEL, "bias")[0].outputs > 1e-2


@pytest.mark.parametrize("mesh", [TENSOR_PARALLEL, WITH_FSDP], ids=str)
@pytest.mark.parametrize("repeats", [1, 2])
def test_checkpointed_blocks_called_once_or_twice(gloo: Gloo, mesh: Mesh, repeats: int) -> None:
    assert exact(gloo(mesh.world).run(workers.checkpointed, mesh, repeats)[0])


@pytest.mark.parametrize("mesh", [TENSOR_PARALLEL, WITH_FSDP], ids=str)
def test_a_layer_that_the_last_backward_skips_keeps_its_gradient(gloo: Gloo, mesh: Mesh) -> None:
    assert exact(gloo(mesh.world).run(workers.unused_in_the_last_backward, mesh)[0])


def test_zero_grad_drops_an_accumulation(gloo: Gloo) -> None:
    assert exact(gloo(2).run(workers.dropped_accumulation, TENSOR_PARALLEL)[0])


@pytest.mark.parametrize("mesh", [TENSOR_PARALLEL, WITH_FSDP], ids=str)
def test_an_exception_in_a_region_leaves_nothing_behind(gloo: Gloo, mesh: Mesh) -> None:
    report, left = gloo(mesh.world).run(workers.after_an_exception, mesh)[0]
    assert exact(report)
    assert left == 0


@pytest.mark.parametrize("mesh", [TENSOR_PARALLEL, WITH_FSDP], ids=str)
def test_no_activation_and_no_full_parameter_stays_alive(gloo: Gloo, mesh: Mesh) -> None:
    assert gloo(mesh.world).run(workers.held_activations, mesh) == [0] * mesh.world
    assert gloo(mesh.world).run(workers.old_parameters, mesh) == [[]] * mesh.world


@pytest.mark.parametrize("mesh", [TENSOR_PARALLEL, WITH_FSDP], ids=str)
def test_a_model_on_meta_is_cut_before_it_has_values(gloo: Gloo, mesh: Mesh) -> None:
    assert exact(gloo(mesh.world).run(workers.from_meta, mesh)[0])


@pytest.mark.parametrize("mesh", [TENSOR_PARALLEL, WITH_FSDP], ids=str)
def test_an_optimizer_made_before(gloo: Gloo, mesh: Mesh) -> None:
    assert exact(gloo(mesh.world).run(workers.optimizer_made_before, mesh)[0])


def test_compiled_blocks(gloo: Gloo) -> None:
    report, breaks = gloo(2).run(workers.compiled, TENSOR_PARALLEL)[0]
    assert exact(report)
    assert breaks == 0


def test_copies_and_pickles(gloo: Gloo) -> None:
    assert max(gloo(2).run(workers.copies, TENSOR_PARALLEL)[0]) < TOLERANCE


def test_ranks_with_other_values_follow_rank_0(gloo: Gloo) -> None:
    for messages, report in gloo(2).run(workers.different_values, TENSOR_PARALLEL):
        assert exact(report)
        assert len(messages) == 1
        assert "37 of 39 tensors differed between ranks" in messages[0]


def test_a_refusal_on_one_rank_is_a_refusal_on_all(gloo: Gloo) -> None:
    first, second = gloo(2).run(workers.refusals, TENSOR_PARALLEL)
    assert first["another plan"] == second["another plan"]
    assert first["another plan"].startswith("RanksDisagree: 1 of 2 ranks have another plan than rank 0")
    assert first["one refuses"].startswith("RanksDisagree: rank 1 refused\n  got: PlanMismatch: the plan does not know")
    assert second["one refuses"].startswith("PlanMismatch: the plan does not know the parameter norm.weight")
    for said in (first, second):
        assert said["half-way"].startswith("Unusable: applying the plan failed half-way on rank 1")
        assert said["afterwards"] == said["half-way"]
