"""Losses inside the model on logits that stay cut: as one process, to 1e-9 in float64; what they send and hold."""

from __future__ import annotations

import functools
from typing import Any

import losses_workers
import pytest
import torch
import torch.nn.functional as F
from counting import CountAxes, Sent, predicted
from live_bytes import LiveBytes
from losses_models import MODELS, batch, call, loss_of, make
from rows import few
from simulate import fake_world
from torch.distributed.device_mesh import init_device_mesh

from autoshard.api import plan as make_plan
from autoshard.executor.collectives import Axis, Conversion
from autoshard.executor.execute import apply, make_mesh
from autoshard.plans import AXES, Plan
from autoshard.proving.processes import verify_in_processes

TOLERANCE = 1e-9


@functools.cache
def planned(name: str, world: int = 2, dtype: torch.dtype = torch.float64, **options: Any) -> Plan:
    model = make(name).to(dtype)
    asked: dict[str, Any] = {"tp": 2, "checkpointing": "none", "batch": 4, "sequence": 8} | options
    made = make_plan(model, world, example_inputs=batch(model), **asked)
    assert made.cuts_losses
    return made


def wrong(errors: dict[str, float]) -> dict[str, float]:
    return {key: error for key, error in errors.items() if not error < TOLERANCE}


@pytest.mark.parametrize("name", few(MODELS, ["within", "llama"]))
def test_trains_as_one_process(gloo: Any, name: str) -> None:
    for errors in gloo(2).run(losses_workers.trained, name, planned(name).to_dict()):
        assert wrong(errors) == {}


@pytest.mark.parametrize("name", few(["nano", "llama"], 1))
def test_returns_cut_logits_beside_it(gloo: Any, name: str) -> None:
    for errors in gloo(2).run(losses_workers.trained, name, planned(name, logits="sharded").to_dict()):
        assert wrong(errors) == {}


@pytest.mark.long
def test_over_four_ranks(gloo: Any) -> None:
    for errors in gloo(4).run(losses_workers.trained, "mean", planned("mean", 4, tp=4).to_dict()):
        assert wrong(errors) == {}


@pytest.mark.parametrize(("name", "checkpointing"), few([("within", "full"), ("llama", "none")], 1))
def test_trains_under_fsdp(gloo: Any, name: str, checkpointing: str) -> None:
    data = planned(name, 4, dp_shard=2).to_dict()
    for errors in gloo(4).run(losses_workers.trained, name, data, checkpointing):
        assert wrong(errors) == {}


def test_with_the_sequence_cut_too(gloo: Any) -> None:
    made = planned("nano", sequence_parallel=True)
    assert made.sequence
    for errors in gloo(2).run(losses_workers.trained, "nano", made.to_dict()):
        assert wrong(errors) == {}


@pytest.mark.parametrize("name", few(["nano", "llama"], 1))
def test_whole_logits_where_no_labels_are_given(gloo: Any, name: str) -> None:
    for errors in gloo(2).run(losses_workers.unlabelled, name, planned(name).to_dict()):
        assert wrong(errors) == {}


def test_in_bfloat16_it_is_the_loss_on_whole_logits(gloo: Any) -> None:
    cut = planned("llama", 4, torch.float32, dp_shard=2).to_dict()
    whole: Any = planned("llama", 4, torch.float32, dp_shard=2).to_dict()
    whole["modules"]["lm_head"]["outputs"] = {"": "S(-1)->R"}
    for errors in gloo(4).run(losses_workers.narrow, cut, whole):
        assert errors.pop("loss") < 1e-5
        assert max(errors.values()) < 2**-7


def test_a_spoiled_plan_fails(gloo: Any) -> None:
    data = planned("nano").to_dict()
    data["modules"]["head"]["inputs"] = {}
    errors = gloo(2).run(losses_workers.trained, "nano", data)[0]
    assert errors["0 result 1"] < TOLERANCE  # only the gradients tell
    assert max(wrong(errors).values()) > 1e-3


@pytest.mark.long  # test_processes.py has it for losses outside of the model
def test_verify_on_processes() -> None:
    model = make("criterion")
    proof = verify_in_processes(model, planned("criterion"), 4, example_inputs=batch(model))
    assert proof.ok, str(proof)


# --- what it sends and holds ---


def started(name: str, plan: Plan) -> Sent:
    """The collectives of a second step, its loss included."""
    sent: Sent = {}
    with fake_world(plan.mesh.world):
        mesh = make_mesh(plan, "cpu")
        axes = {str(mesh[axis].get_group().group_name): axis for axis in AXES if mesh[axis].size() > 1}
        model = apply(make(name).float(), plan, mesh)
        for _ in range(2):
            with CountAxes(axes) as seen:
                loss_of(call(model, batch(model))).backward()
            sent = seen.sent
    return sent


@pytest.mark.parametrize(
    ("name", "mesh", "logits"),
    few([("nano", (1, 1), "whole"), ("mean", (2, 4), "whole"), ("llama", (1, 4), "sharded"), ("none", (1, 1), "whole"),
         ("within", (4, 1), "whole"), ("gemma2", (1, 4), "whole")], 3),
)  # fmt: skip
def test_a_step_sends_what_the_plan_says(name: str, mesh: tuple[int, int], logits: str) -> None:
    replicas, shards = mesh
    plan = planned(
        name, 2 * replicas * shards, torch.float32, dp_replicate=replicas, dp_shard=shards, sequence_parallel=False,
        logits=logits,
    )  # fmt: skip
    assert started(name, plan) == predicted(plan)
    gathers = predicted(plan).get(("tp", "all_gather"), (0, 0))[0]
    assert gathers == (1 if name in ("nano", "llama", "gemma2") and logits == "whole" else 0)


def test_a_loss_that_is_said_to_send_otherwise_is_found() -> None:
    plan = planned("mean", dtype=torch.float32, sequence_parallel=False)
    said, sent = predicted(plan), started("mean", plan)
    rows = 4 * 7
    (count, size), (_, gathered) = said["tp", "all_reduce"], said.get(("tp", "all_gather"), (0, 0))
    assert sent == said and gathered == 0
    without = {**said, ("tp", "all_reduce"): (count - 2, size - 3 * rows * 4)}
    assert sent != without


def test_a_rank_holds_its_part_of_the_loss() -> None:
    rows, classes, tp = 64, 4096, 4
    made = torch.randn(rows, classes // tp)
    target = torch.zeros(rows, dtype=torch.long)
    with fake_world(tp):
        axis = Axis(init_device_mesh("cpu", (tp,)))
        leaf = made.clone().requires_grad_()
        with LiveBytes() as alive:
            F.cross_entropy(Conversion.parse("S(-1)->L")(leaf.neg(), axis), target).backward()
    # its logits and their gradient, which the exponentials become
    assert alive.peak == pytest.approx(2 * made.nbytes, rel=0.02)
