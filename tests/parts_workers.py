"""Jobs on gloo ranks for parameters that are cut in parts or read in slices. Each returns errors, or what was said."""

from __future__ import annotations

import copy
import io
from typing import Any

import torch
import torch.distributed as dist
from parts_models import HIDDEN, WIDE, Model, plan_of
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import autoshard
from autoshard.errors import AutoshardError
from autoshard.executor.execute import apply, make_mesh, set_gradient_sync
from autoshard.executor.inparts import InParts
from autoshard.executor.training import PLAIN, Training
from autoshard.executor.whole import full_gradients, full_parameters
from autoshard.plans import Mesh

Errors = dict[str, float]
STEPS = 3
FULL = StateDictOptions(full_state_dict=True)


def relative(got: Tensor, wanted: Tensor) -> float:
    if got.shape != wanted.shape:
        return float("inf")
    return float((got - wanted).abs().max() / wanted.abs().max().clamp_min(1e-6))


def batches(seed: int, mesh: Mesh) -> Tensor:
    return torch.randn(2 * mesh.data, 5, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def mine(batch: Tensor, mesh: Mesh) -> Tensor:
    return batch.chunk(mesh.data)[dist.get_rank() // mesh.tp]


def adamw(model: nn.Module, **options: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3, **options)


def worst(prefix: str, got: dict[str, Any], wanted: dict[str, Any]) -> Errors:
    assert got.keys() == wanted.keys()
    pairs = ((name, one, wanted[name]) for name, one in got.items() if isinstance(one, Tensor))
    return {f"{prefix} {name}": relative(full(one), full(other)) for name, one, other in pairs}


def full(tensor: Tensor) -> Tensor:
    plain = tensor.detach()
    return plain.full_tensor() if isinstance(plain, DTensor) else plain


class Pair:
    """An untouched model and a sharded one, each with an optimizer; ``mesh`` of one tp rank is still sharded."""

    def __init__(
        self, mesh: Mesh, seed: int = 0, before: bool = False, training: Training = PLAIN, **options: Any
    ) -> None:
        self.mesh = mesh
        self.whole, self.model = Model(seed), Model(seed)
        self.theirs = adamw(self.whole)
        self.ours = adamw(self.model, **options)
        if before:
            train(self.model, self.ours, 9, Mesh(), 1)
            train(self.whole, self.theirs, 9, Mesh(), 1)
        plan = plan_of(self.model, mesh)
        apply(self.model, plan, make_mesh(plan, "cpu"), [self.ours] if before else [], training=training)
        if not before:
            self.ours = adamw(self.model, **options)

    def train(self, steps: int = STEPS) -> Errors:
        """Steps of two accumulated backwards each, clipped; compares everything that comes up."""
        errors: Errors = {}
        for step in range(steps):
            for part in range(2):
                set_gradient_sync(self.model, part == 1)
                batch = batches(10 * step + part, self.mesh)
                wanted, got = self.whole(batch), self.model(mine(batch, self.mesh))
                errors[f"output {step}"] = relative(got.detach(), mine(wanted.detach(), self.mesh))
                loss_of(wanted).backward()
                loss_of(got).backward()
            grads = {n: p.grad for n, p in self.whole.named_parameters(remove_duplicate=False)}
            errors |= worst(f"gradient {step}", full_gradients(self.model), grads)
            errors |= worst(f"own {step}", dict(grads_of(self.model)), dict(grads_of(self.whole)))
            clip = nn.utils.clip_grad_norm_ if step else autoshard.clip_grad_norm_
            errors[f"norm {step}"] = relative(
                full(clip(self.model.parameters(), 0.5)), nn.utils.clip_grad_norm_(self.whole.parameters(), 0.5)
            )
            for optimizer in (self.theirs, self.ours):
                optimizer.step()
                optimizer.zero_grad()
        return errors | self.compare()

    def compare(self) -> Errors:
        """Parameters and optimizer state, through every door."""
        whole = dict(self.whole.named_parameters(remove_duplicate=False))
        errors = worst("full_parameters", full_parameters(self.model), whole)
        errors |= worst("full_tensor", dict(self.model.named_parameters(remove_duplicate=False)), whole)
        errors |= worst("state_dict", self.model.state_dict(), self.whole.state_dict())
        errors |= worst("gathered", get_model_state_dict(self.model, options=FULL), self.whole.state_dict())
        got: Any = get_optimizer_state_dict(self.model, self.ours, options=FULL)["state"]
        wanted: Any = get_optimizer_state_dict(self.whole, self.theirs, options=FULL)["state"]
        for name, values in wanted.items():
            errors |= worst(f"state of {name}", got[name], values)
        for parameter, other in zip(self.model.parameters(), self.whole.parameters(), strict=True):
            errors |= worst(f"moments {tuple(other.shape)}", self.ours.state[parameter], self.theirs.state[other])
        return errors


def grads_of(model: nn.Module) -> list[tuple[str, Tensor | None]]:
    return [(name, p.grad) for name, p in model.named_parameters()]


def loss_of(answer: Tensor) -> Tensor:
    return answer.square().mean()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int, mesh: Mesh, steps: int) -> None:
    for step in range(steps):
        loss_of(model(batches(seed + step, mesh))).backward()
        optimizer.step()
        optimizer.zero_grad()


def parity(mesh: Mesh, before: bool = False, training: Training = PLAIN, **options: Any) -> Errors:
    """Training as the untouched model does."""
    return Pair(mesh, before=before, training=training, **options).train()


def save(mesh: Mesh, folder: str) -> Errors:
    """Train, and save model and optimizer; the plain model's values are saved for comparison."""
    pair = Pair(mesh)
    errors = pair.train(2)
    model, optimizer = get_state_dict(pair.model, pair.ours)
    dcp_save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
    async_save({"model": pair.model.state_dict()}, checkpoint_id=folder + "-async").result()  # type: ignore[union-attr]
    offloaded = get_model_state_dict(pair.model, options=StateDictOptions(cpu_offload=True))
    dcp_save({"model": offloaded}, checkpoint_id=folder + "-offloaded")
    if dist.get_rank() == 0:
        torch.save({"model": pair.whole.state_dict(), "optimizer": pair.theirs.state_dict()}, folder + ".pt")
    dist.barrier()
    return errors


def load(mesh: Mesh, folder: str) -> Errors:
    """Load into other values on another mesh, in the usual way, in place, and from whole tensors; then train on."""
    wanted = torch.load(folder + ".pt", weights_only=False)
    pair = Pair(mesh, seed=1)
    pair.whole.load_state_dict(wanted["model"])
    pair.theirs.load_state_dict(wanted["optimizer"])
    model, optimizer = get_state_dict(pair.model, pair.ours)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer}
    dcp_load(state, checkpoint_id=folder)
    set_state_dict(pair.model, pair.ours, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    errors = pair.compare() | {f"on: {name}": error for name, error in pair.train(1).items()}
    for suffix in ("-async", "-offloaded"):
        other = Pair(mesh, seed=2)
        other.whole.load_state_dict(wanted["model"])
        dcp_load({"model": other.model.state_dict()}, checkpoint_id=folder + suffix)
        errors |= worst(suffix, full_parameters(other.model), other_parameters(other.whole))
        errors |= worst(suffix, other.model.state_dict(), other.whole.state_dict())
    return errors


def other_parameters(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_parameters(remove_duplicate=False))


def load_whole(mesh: Mesh) -> Errors:
    """Whole tensors of one process, model and optimizer, handed to torch; and canonical DTensors assigned."""
    pair = Pair(mesh, seed=1)
    source = Model(3)
    optimizer = adamw(source)
    train(source, optimizer, 5, Mesh(), 1)
    state = get_optimizer_state_dict(source, optimizer, options=FULL)
    set_model_state_dict(pair.model, source.state_dict(), options=FULL)
    set_optimizer_state_dict(pair.model, pair.ours, copy.deepcopy(state), options=FULL)
    pair.whole, pair.theirs = source, optimizer
    errors = {f"whole: {name}": error for name, error in pair.train(1).items()}
    canonical = {
        name: distribute_tensor(value.detach(), entry.device_mesh, entry.placements, src_data_rank=None)
        if isinstance(entry := pair.model.state_dict()[name], DTensor)
        else value
        for name, value in Model(4).state_dict().items()
    }
    pair.model.load_state_dict(canonical, assign=True)
    errors |= worst("assigned", full_parameters(pair.model), other_parameters(Model(4)))
    batch = batches(0, mesh)
    errors["assigned: output"] = relative(pair.model(mine(batch, mesh)).detach(), mine(Model(4)(batch).detach(), mesh))
    return errors


def refused(mesh: Mesh) -> dict[str, str]:
    """What would be silently wrong, by what was tried."""
    model = Pair(mesh).model
    weight: Any = dict(model.named_parameters())["fused.qkv.weight"]
    plain: Any = distribute_tensor(
        torch.zeros(weight.shape, dtype=torch.float64), weight.device_mesh, weight.placements, src_data_rank=None
    )
    tries: dict[str, Any] = {
        "to_local": lambda: weight.to_local(),
        "redistribute": lambda: weight.redistribute(placements=[Shard(1)] * len(plain.placements)),
        "product": lambda: weight @ plain[:HIDDEN],
        "view": lambda: weight.view(-1),
        "item": lambda: weight.__setitem__(0, 0.0),
        "mean": lambda: weight.mean(1),
        "sum of two orders": lambda: weight + plain,
        "comparison of two orders": lambda: torch.equal(weight, plain),
        "copied out": lambda: plain.copy_(weight.detach()),
        "gradient": lambda: setattr(weight, "grad", plain),
        "broadcast": lambda: set_model_state_dict(
            model, Model(1).state_dict(), options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        ),
    }
    said = {}
    for name, attempt in tries.items():
        try:
            with torch.no_grad():
                attempt()
            said[name] = "passed"
        except AutoshardError as error:
            said[name] = str(error)
    return said


def spoiled(mesh: Mesh, how: str) -> Errors:
    """One thing spoiled: the parts, the slices, or what says that a tensor is in parts; returns what it makes wrong."""
    whole, model = Model(), Model()
    changes: dict[str, dict[str, Any]] = {}
    if how == "parts":
        changes = {"fused__qkv__weight": {"tp_parts": None}}
    if how == "slices":
        changes = {"mixed__qkv__bias": {"slices": ((0, 2 * WIDE, 1), (2 * WIDE, 4 * WIDE, 4 // 4 * mesh.tp))}}
    plan = plan_of(model, mesh, **changes)
    apply(model, plan, make_mesh(plan, "cpu"))
    if how == "order":
        for parameter in model.parameters():
            if isinstance(parameter, InParts):
                parameter.__class__ = DTensor  # type: ignore[assignment]
        return worst("full_parameters", full_parameters(model), other_parameters(whole))
    batch = batches(0, mesh)
    return {"output": relative(model(batch).detach(), whole(batch).detach())}


def copies(mesh: Mesh) -> Errors:
    """A deep copy, and a pickle, of what is held in parts."""
    pair = Pair(mesh)
    errors = worst("copy", dict(copy.deepcopy(pair.model).named_parameters()), dict(pair.whole.named_parameters()))
    stream = io.BytesIO()
    torch.save(dict(pair.model.state_dict()), stream)
    stream.seek(0)
    return errors | worst("pickle", torch.load(stream), dict(pair.whole.state_dict()))
