"""Logits that stay cut, and the loss on them under torch's ``loss_parallel``: as one process, to 1e-9 in float64."""

from __future__ import annotations

import functools
from typing import Any

import logits_workers
import pytest
import torch
import torch.nn.functional as F
from counting import CountAxes, Sent, predicted
from live_bytes import LiveBytes
from logits_models import MODELS, make
from rows import few
from simulate import fake_world
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import loss_parallel

from autoshard import cost
from autoshard.api import plan as make_plan
from autoshard.executor.execute import apply, make_mesh
from autoshard.plans import AXES, Plan
from autoshard.proving.processes import verify_in_processes

TOLERANCE = 1e-9
IDS = torch.zeros(2, 8, dtype=torch.long)


@functools.cache
def planned(name: str, world: int = 2, dtype: torch.dtype = torch.float64, **options: Any) -> Plan:
    model = make(name).to(dtype)
    given: Any = {"input_ids": IDS} if hasattr(model, "config") else (IDS,)
    asked: dict[str, Any] = {"tp": 2, "checkpointing": "none", "batch": 2, "sequence": 8, "logits": "sharded"} | options
    made = make_plan(model, world, example_inputs=given, **asked)
    assert made.cuts_logits == (asked["logits"] == "sharded")
    return made


def wrong(errors: dict[str, float]) -> dict[str, float]:
    return {key: error for key, error in errors.items() if not error < TOLERANCE}


@pytest.mark.parametrize("name", MODELS)
def test_trains_as_one_process(gloo: Any, name: str) -> None:
    for errors in gloo(2).run(logits_workers.trained, name, planned(name).to_dict()):
        assert wrong(errors) == {}


@pytest.mark.parametrize("name", few(["decoder", "tied", "gemma2"], 1))
def test_trains_under_fsdp(gloo: Any, name: str) -> None:
    for errors in gloo(4).run(logits_workers.trained, name, planned(name, 4, dp_shard=2).to_dict()):
        assert wrong(errors) == {}


def test_with_the_sequence_cut_too(gloo: Any) -> None:
    made = planned("capped", sequence_parallel=True)
    assert made.sequence
    data = made.to_dict()
    for errors in gloo(2).run(logits_workers.trained, "capped", data, length=8):
        assert wrong(errors) == {}


def test_with_blocks_that_run_again(gloo: Any) -> None:
    for errors in gloo(4).run(logits_workers.trained, "tied", planned("tied", 4, dp_shard=2).to_dict(), 7, "full"):
        assert wrong(errors) == {}


def test_in_bfloat16_it_is_the_loss_on_whole_logits(gloo: Any) -> None:
    cut, whole = (
        planned("llama", 4, torch.float32, dp_shard=2, logits=logits).to_dict() for logits in ("sharded", "whole")
    )
    for errors in gloo(4).run(logits_workers.narrow, cut, whole):
        assert errors.pop("loss") < 1e-5
        assert max(errors.values()) < 2**-7


def test_a_loop_without_ours_and_another_loss(gloo: Any) -> None:
    for errors in gloo(2).run(logits_workers.plain, planned("decoder").to_dict()):
        assert wrong(errors) == {}


def test_labels_that_it_was_not_planned_with(gloo: Any) -> None:
    for answer in gloo(2).run(logits_workers.labelled, planned("llama").to_dict()):
        assert wrong(answer["errors"]) == {}
        assert "mixed torch.Tensor and DTensor" in answer["said"]  # never a wrong number


def test_generates(gloo: Any) -> None:
    for got, want in gloo(2).run(logits_workers.generated, planned("llama").to_dict()):
        assert got == want and len(got) == 4 * 12


def test_a_spoiled_plan_fails(gloo: Any) -> None:
    data = planned("decoder").to_dict()
    data["modules"]["head"]["inputs"] = {}
    errors = gloo(2).run(logits_workers.trained, "decoder", data)[0]
    assert errors["0 loss"] < TOLERANCE  # only the gradients tell
    assert max(wrong(errors).values()) > 1e-3


@pytest.mark.long  # test_processes.py has it for whole logits
def test_verify_on_processes() -> None:
    proof = verify_in_processes(make("capped"), planned("capped"), 4)
    assert proof.ok, str(proof)


# --- what it sends and holds ---


#: a model, and its degrees of dp_replicate and dp_shard
STEPS = [("decoder", (1, 1)), ("tied", (2, 4)), ("gemma2", (1, 4)), ("llama", (4, 1))]


class CountAll(CountAxes):
    """Counts the collectives of ``loss_parallel`` too."""

    def _count(self, function: Any, args: Any) -> None:
        if function.namespace != "_c10d_functional":
            super()._count(function, args)
        elif function._schema.name.endswith("::all_reduce"):
            count, size = self.sent.get(("tp", "functional"), (0, 0))
            self.sent["tp", "functional"] = (count + 1, size + args[0].nbytes)


def started(name: str, plan: Plan, loss: bool) -> Sent:
    """The collectives of a second step; with a loss, or without any."""
    sent: Sent = {}
    with fake_world(plan.mesh.world):
        mesh = make_mesh(plan, "cpu")
        axes = {str(mesh[axis].get_group().group_name): axis for axis in AXES if mesh[axis].size() > 1}
        model = apply(make(name).float(), plan, mesh)
        for _ in range(2):
            with CountAll(axes) as seen, loss_parallel():
                answer = model(IDS)
                logits = answer if isinstance(answer, DTensor) else answer.logits
                labels = IDS.flatten()
                (F.cross_entropy(logits.flatten(0, 1), labels) if loss else logits.to_local().sum()).backward()
            sent = seen.sent
    return sent


@pytest.mark.parametrize(
    ("name", "mesh"), [("decoder", (1, 1)), ("tied", (2, 4)), ("gemma2", (1, 4)), ("llama", (4, 1))]
)
def test_a_step_sends_what_the_plan_says(name: str, mesh: tuple[int, int]) -> None:
    replicas, shards = mesh
    degrees: dict[str, Any] = {"dp_replicate": replicas, "dp_shard": shards, "tp": 2}
    plan = make_plan(
        make(name).float(), 2 * replicas * shards, example_inputs={"input_ids": IDS} if "m" in name else (IDS,),
        batch=2, sequence=8, checkpointing="none", logits="sharded", sequence_parallel=False, **degrees,
    )  # fmt: skip
    assert started(name, plan, loss=False) == predicted(plan)
    assert not any(op == "all_gather" and axis == "tp" for axis, op in predicted(plan))
    with_loss = started(name, plan, loss=True)
    assert with_loss.pop(("tp", "functional")) == (3, 3 * IDS.numel() * 4)
    assert with_loss == predicted(plan)


@pytest.mark.parametrize("cut", [True, False])
def test_the_loss_holds_what_the_cost_model_says(cut: bool) -> None:
    rows, vocab, tp = 64, 4096, 4
    local = torch.randn(rows, vocab // tp if cut else vocab, requires_grad=True)
    labels = torch.zeros(rows, dtype=torch.long)
    with fake_world(tp), LiveBytes() as alive, loss_parallel():
        made = local.neg()
        logits = DTensor.from_local(made, init_device_mesh("cpu", (tp,)), [Shard(1)]) if cut else made
        loss = F.cross_entropy(logits, labels)
        del made, logits
        loss.backward()
    assert alive.peak == pytest.approx(cost.loss_bytes(local.numel(), cut), rel=0.01)
    assert alive.peak != pytest.approx(cost.loss_bytes(local.numel(), not cut), rel=0.01)
