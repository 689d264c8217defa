"""Jobs that run on every rank of a gloo pool. Each returns numbers for the test to judge."""

from __future__ import annotations

import copy
import dataclasses
import gc
import pickle
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from executor_models import Config, Decoder, Report, decoder_plan, loss_of
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from autoshard.errors import AutoshardError
from autoshard.executor.execute import apply, make_mesh, set_gradient_sync
from autoshard.executor.training import PLAIN, Training
from autoshard.executor.whole import full_gradients, full_parameters
from autoshard.plans import Mesh, Plan

SEQUENCE = 7


def relative(got: Tensor, wanted: Tensor) -> float:
    """Error relative to the largest magnitude; a gradient of zeros has a floor."""
    return float((got - wanted).abs().max() / wanted.abs().max().clamp_min(1e-6))


class Twins:
    """A sharded model and the untouched one, on the same batches: each data rank sees its part."""

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        spoil: str | None = None,
        seed: int = 0,
        prepare: Callable[[Decoder], None] = lambda model: None,
        optimizers: Sequence[torch.optim.Optimizer] = (),
        training: Training = PLAIN,
    ) -> None:
        self.mesh = mesh
        self.whole, self.model = Decoder(config), Decoder(dataclasses.replace(config, seed=seed))
        self.plan: Plan = decoder_plan(self.model, mesh, spoil)
        self.device_mesh: DeviceMesh = make_mesh(self.plan, "cpu")
        prepare(self.model)
        apply(self.model, self.plan, self.device_mesh, optimizers, training=training)
        self.report = Report()
        self.generator = torch.Generator().manual_seed(1)

    def ids(self, per_rank: int = 2, sequence: int = SEQUENCE) -> Tensor:
        shape = (per_rank * self.mesh.data, sequence)
        return torch.randint(0, self.whole.config.vocab, shape, generator=self.generator)

    def mine(self, batch: Tensor) -> Tensor:
        return batch.chunk(self.mesh.data)[dist.get_rank() // self.mesh.tp]

    def step(self, divide: int = 1, per_rank: int = 2, sequence: int = SEQUENCE) -> None:
        """One forward and backward of both; compares outputs and losses."""
        ids = self.ids(per_rank, sequence)
        wanted, got = self.whole(ids), self.model(self.mine(ids))
        self.report.outputs = max(self.report.outputs, relative(got.detach(), self.mine(wanted.detach())))
        loss, ours = loss_of(wanted, ids), loss_of(got, self.mine(ids))
        total = ours.detach().clone()
        dist.all_reduce(total)
        self.report.losses = max(self.report.losses, relative(total / dist.get_world_size(), loss.detach()))
        (loss / divide).backward()
        (ours / divide).backward()

    def forward_only(self, per_rank: int, sequence: int) -> None:
        ids = self.ids(per_rank, sequence)
        wanted, got = self.whole(ids), self.model(self.mine(ids))
        self.report.outputs = max(self.report.outputs, relative(got.detach(), self.mine(wanted.detach())))

    def compare_gradients(self, when: str) -> None:
        gradients = full_gradients(self.model)
        for name, parameter in self.whole.named_parameters(remove_duplicate=False):
            got, wanted = gradients[name], parameter.grad
            assert got is not None and wanted is not None, f"{name} has no gradient ({when})"
            self.report.gradients[f"{when} {name}"] = relative(got, wanted)

    def compare_parameters(self) -> None:
        whole = dict(self.whole.named_parameters(remove_duplicate=False))
        for name, got in full_parameters(self.model).items():
            self.report.parameters = max(self.report.parameters, relative(got, whole[name].detach()))

    def zero(self) -> None:
        self.whole.zero_grad()
        self.model.zero_grad()

    def train(self, steps: int, foreach: bool | None = None, fused: bool | None = None) -> None:
        """Optimizer steps with torch's own clipping."""
        theirs, ours = (
            torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3, foreach=foreach, fused=fused)
            for model in (self.whole, self.model)
        )
        for _ in range(steps):
            self.step()
            wanted = nn.utils.clip_grad_norm_(self.whole.parameters(), 0.5)
            got = nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
            got = got.full_tensor() if isinstance(got, DTensor) else got
            self.report.norms = max(self.report.norms, relative(got, wanted))
            for optimizer in (theirs, ours):
                optimizer.step()
                optimizer.zero_grad()
        self.compare_parameters()


def parity(config: Config, mesh: Mesh) -> Report:
    """Everything a training loop does, against the untouched model."""
    twins = Twins(config, mesh)
    assert list(twins.model.state_dict()) == list(twins.whole.state_dict())
    assert twins.model.head._parameters["weight"] is twins.model.table._parameters["weight"]
    twins.step()
    twins.compare_gradients("one backward")
    twins.zero()
    for _ in range(2):
        twins.step(divide=2)
    twins.compare_gradients("two synchronised")
    twins.zero()
    for last in (False, False, True):
        set_gradient_sync(twins.model, last)
        twins.step(divide=3)
    twins.compare_gradients("three accumulated")
    twins.zero()
    with torch.no_grad():
        twins.forward_only(1, 5)
    twins.model.eval()
    twins.forward_only(1, 11)
    twins.model.train()
    twins.step(per_rank=1, sequence=3)
    twins.compare_gradients("batch 1")
    twins.zero()
    twins.train(2, foreach=True)
    twins.train(1, fused=True)
    return twins.report


def spoiled(mesh: Mesh, how: str) -> Report:
    """One step of a plan that leaves something out."""
    twins = Twins(Config(), mesh, spoil=how)
    twins.step()
    twins.compare_gradients("one backward")
    return twins.report


def checkpointed(mesh: Mesh, repeats: int) -> Report:
    """Blocks under activation checkpointing, each called ``repeats`` times, gradients accumulated."""
    twins = Twins(Config(checkpointing=True, repeats=repeats), mesh)
    for last in (False, True):
        set_gradient_sync(twins.model, last)
        twins.step(divide=2)
    twins.compare_gradients("checkpointed")
    return twins.report


def unused_in_the_last_backward(mesh: Mesh) -> Report:
    """A unit that only the unsynchronised backward uses must not lose or defer its gradient."""
    twins = Twins(Config(), mesh)
    set_gradient_sync(twins.model, False)
    twins.step(divide=2)
    set_gradient_sync(twins.model, True)
    for model in (twins.whole, twins.model):
        model.block(0).attention.forward = _skipped  # type: ignore[method-assign]
    twins.step(divide=2)
    twins.compare_gradients("layer dropped")
    return twins.report


def dropped_accumulation(mesh: Mesh) -> Report:
    """``zero_grad`` drops what an unsynchronised backward has left, all of it."""
    twins = Twins(Config(), mesh)
    set_gradient_sync(twins.model, False)
    twins.step()
    twins.zero()
    twins.step(divide=2)
    set_gradient_sync(twins.model, True)
    twins.step(divide=2)
    twins.compare_gradients("after dropping")
    return twins.report


def _skipped(x: Tensor) -> Tensor:
    return x


def after_an_exception(mesh: Mesh) -> tuple[Report, int]:
    """A forward that fails inside a region leaves nothing behind."""
    twins = Twins(Config(), mesh)
    handle = twins.model.block(1).feed.up.register_forward_pre_hook(_fail)
    try:
        twins.model(twins.mine(twins.ids()))
    except ZeroDivisionError:
        handle.remove()
    if isinstance(twins.model, FSDPModule):
        twins.model.reset_iter_state()
    applied = twins.model.__dict__["_autoshard"]
    left = sum(len(sums._reads) for sums in applied.sums)
    twins.step()
    twins.compare_gradients("after an exception")
    return twins.report, left


def _fail(module: nn.Module, args: Any) -> None:
    raise ZeroDivisionError


def held_activations(mesh: Mesh) -> int:
    """How many inputs of the shared entries outlive the forward."""
    twins = Twins(Config(), mesh)
    seen: list[weakref.ref[Tensor]] = []
    for index in range(2):
        twins.model.block(index).attention.norm.register_forward_hook(lambda m, a, out: seen.append(weakref.ref(out)))
    logits = twins.model(twins.mine(twins.ids()))
    del logits
    assert len(seen) == 2
    return _alive_for_long(seen)


def _alive_for_long(seen: list[weakref.ref[Tensor]], seconds: float = 2.0) -> int:
    """How many are alive after a while: the process group's threads may let go of a tensor a moment later."""
    end = time.monotonic() + seconds
    while (alive := sum(ref() is not None for ref in seen)) and time.monotonic() < end:
        gc.collect()
    return alive


def old_parameters(mesh: Mesh) -> list[str]:
    """Names of full parameters that are alive after applying."""
    model = Decoder(Config())
    plan = decoder_plan(model, mesh)
    old = {name: weakref.ref(p) for name, p in model.named_parameters()}
    gc.disable()
    apply(model, plan, make_mesh(plan, "cpu"))
    gc.enable()
    return [name for name, ref in old.items() if ref() is not None]


def copies(mesh: Mesh) -> list[float]:
    """A deep copy and an unpickled one compute the same, and their gradients are their own."""
    twins = Twins(Config(), mesh)
    ids = twins.ids()
    made = [copy.deepcopy(twins.model), pickle.loads(pickle.dumps(twins.model))]
    errors = []
    for model in made:
        model.zero_grad()
        twins.model.zero_grad()
        loss_of(model(ids), ids).backward()
        assert all(p.grad is None for p in twins.model.parameters())
        loss_of(twins.model(ids), ids).backward()
        mine, other = full_gradients(twins.model), full_gradients(model)
        errors += [relative(_some(other[name]), _some(mine[name])) for name in mine]
    return errors


def _some(gradient: Tensor | None) -> Tensor:
    assert gradient is not None
    return gradient


def from_meta(mesh: Mesh) -> Report:
    """Applied on meta, then given values: the way a model that fits on no device is started."""
    config = Config(slopes=False)
    with torch.device("meta"):
        model = Decoder(config)
    plan = decoder_plan(model, mesh)
    apply(model, plan, make_mesh(plan, "cpu"))
    model.to_empty(device="cpu")
    twins = Twins(config, mesh)
    set_model_state_dict(model, twins.whole.state_dict(), options=StateDictOptions(full_state_dict=True))
    twins.model = model
    twins.step()
    twins.compare_gradients("from meta")
    return twins.report


def different_values(mesh: Mesh) -> tuple[list[str], Report]:
    """Ranks that start from different values go on with rank 0's, and are told."""
    seed = 0 if dist.get_rank() == 0 else 7
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        twins = Twins(Config(), mesh, seed=seed)
    twins.step()
    twins.compare_gradients("equalised")
    return [str(w.message) for w in caught if "differed between ranks" in str(w.message)], twins.report


def refusals(mesh: Mesh) -> dict[str, str]:
    """What the ranks say when only one has something against it."""
    said: dict[str, str] = {}
    rank = dist.get_rank()
    model = Decoder(Config())
    plan = decoder_plan(model, mesh)
    device_mesh = make_mesh(plan, "cpu")
    other = dataclasses.replace(plan, model="another") if rank == 1 else plan
    said["another plan"] = _error(lambda: apply(model, other, device_mesh))
    fewer = dict(plan.parameters)
    fewer.pop("norm.weight")
    odd = dataclasses.replace(plan, parameters=fewer) if rank == 1 else plan
    said["one refuses"] = _error(lambda: apply(model, odd, device_mesh))
    assert all(type(p) is nn.Parameter for p in model.parameters())
    if rank == 1:
        model.block(0).feed.up.__class__ = Sealed
    said["half-way"] = _error(lambda: apply(model, plan, device_mesh))
    said["afterwards"] = _error(lambda: model(torch.zeros(1, 3, dtype=torch.long)))
    return said


class Sealed(nn.Linear):
    """A module whose class cannot be replaced."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "__class__":
            raise TypeError("sealed")
        super().__setattr__(name, value)


def _error(action: Callable[[], Any]) -> str:
    try:
        action()
    except AutoshardError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def optimizer_made_before(mesh: Mesh) -> Report:
    """An optimizer made, and stepped, before the plan is applied goes on as if nothing had happened."""
    made: list[torch.optim.Optimizer] = []
    twins = Twins(Config(), mesh, prepare=lambda model: made.append(_stepped(model)), optimizers=made)
    made.append(_stepped(twins.whole))
    for _ in range(2):
        twins.step()
        for optimizer in made:
            optimizer.step()
            optimizer.zero_grad()
    twins.compare_parameters()
    return twins.report


def _stepped(model: Decoder) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3, foreach=True)
    ids = torch.arange(14).view(2, 7)
    loss_of(model(ids), ids).backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def compiled(mesh: Mesh) -> tuple[Report, int]:
    """Blocks compiled in place, each as one graph; returns the graph breaks too."""
    torch.compiler.reset()
    counters.clear()  # another job of this process may have counted
    twins = Twins(Config(), mesh, prepare=_compile_blocks)
    twins.step()
    twins.compare_gradients("compiled")
    return twins.report, sum(counters["graph_break"].values())


def _compile_blocks(model: Decoder) -> None:
    for block in model.blocks:
        block.compile(backend="aot_eager", fullgraph=True)
