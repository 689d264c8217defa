"""Apply a plan to a live model: the one place that calls ``parallelize_module`` and ``fully_shard``.

Order: check everything; agree over ranks; equal values; optimizers let go; tensor parallelism; checkpointing and
compilation of blocks; FSDP, innermost units first; float32 masters; optimizers take up the new parameters; one stream
of random numbers over tp. Until the ranks have agreed nothing has changed. A failure after that leaves a model that
raises ``Unusable``: the originals are not kept, memory matters more.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from autoshard import replace
from autoshard.errors import InvalidArgument, NotDistributed, Unusable
from autoshard.executor.agree import Unanimous, equalise, gather
from autoshard.executor.checks import MARK, check
from autoshard.executor.collectives import Axis, Conversion
from autoshard.executor.cut_logits import hand_out
from autoshard.executor.drawing import one_stream
from autoshard.executor.gradsum import Sync, UnitSums
from autoshard.executor.loading import hold_in_parts
from autoshard.executor.masters import widen
from autoshard.executor.match import boundaries_of, buffer_plans, parameter_plans
from autoshard.executor.returned import Returned
from autoshard.executor.scalars import replicate_scalars
from autoshard.executor.sequence import CutSequence
from autoshard.executor.settings import check_attributes, set_attributes
from autoshard.executor.share import Slot, common_parent
from autoshard.executor.styles import InsideCode, ModuleStyle, Placed
from autoshard.executor.training import PLAIN, Training
from autoshard.executor.units import Units, shard
from autoshard.executor.watch import watch
from autoshard.paths import Argument
from autoshard.plans import AXES, ModulePlan, Plan


@dataclass(eq=False)
class Applied:
    """What a parallelized model remembers, under ``model.__dict__[MARK]``.

    Attributes:
        plan: the plan.
        mesh: the whole mesh.
        training: the options it trains with.
        sync: whether the next backward synchronises gradients, where there is no FSDP to say so.
        sums: the gradient sums of each unit.
    """

    plan: Plan
    mesh: DeviceMesh
    training: Training = PLAIN
    sync: Sync = field(default_factory=Sync)
    sums: list[UnitSums] = field(default_factory=list)

    def forget(self, module: nn.Module, args: Any) -> None:
        """Drop the kept gradients that the user dropped; a forward pre-hook of the model."""
        for sums in self.sums:
            sums.forget()

    def settle(self, module: nn.Module, args: Any, answer: Any) -> None:
        """Leave no kept gradient behind; a forward hook of the model."""
        for sums in self.sums:
            sums.settle()


def apply(
    model: nn.Module,
    plan: Plan,
    mesh: DeviceMesh,
    optimizers: Sequence[torch.optim.Optimizer] = (),
    *,
    training: Training = PLAIN,
    leave: Collection[str] = (),
) -> nn.Module:
    """Apply ``plan`` to ``model`` in place and return it. Every rank calls this.

    Args:
        model: on any device, or on meta; gradients it has are dropped.
        plan: made for this model and this world.
        mesh: what ``make_mesh(plan, ...)`` returns.
        optimizers: made on the model before; they are refilled with the new parameters, in place.
        training: how it will train.
        leave: names of modules that are not touched: other styles hold their parameters.

    Raises:
        AutoshardError: of the class that ``checks.check`` names, with nothing changed.
        RanksDisagree: another rank refused, or has another plan; nothing changed.
        OptimizerError: an optimizer cannot follow its parameters; nothing changed.
        Unusable: it failed half-way, on this rank or another.
    """
    with Unanimous(plan, str(training)):
        check(model, plan, mesh)
        check_attributes(model, plan)
        replace.check(model, plan.replacements)
        training.check(model, plan, mesh)
        training = training.settled(model)
        snapshot = _snapshot(model, plan, optimizers, sharded=plan.mesh.world > 1 or training.uses_fsdp(plan))
    equalise(model, mesh.device_type)
    with _SpoilOnFailure(model):
        if snapshot is not None:
            snapshot.release()
        model.__dict__[MARK] = applied = Applied(plan, mesh, training)
        if plan.mesh.tp > 1:
            _cut(model, applied, leave)
        training.prepare(model, plan, applied.sums)
        if training.uses_fsdp(plan):
            shard(model, plan, mesh, replicate_scalars(model, mesh), training.policies)
        if training.masters is not None:
            widen(model, training.masters)
        if plan.mesh.tp > 1:
            hold_in_parts(model, plan, leave)
        watch(model, plan)
        if snapshot is not None:
            snapshot.restore(model)
    if plan.mesh.tp > 1:
        one_stream(mesh)  # it sends messages: only where no rank has failed
    return model


def _snapshot(model: nn.Module, plan: Plan, optimizers: Sequence[torch.optim.Optimizer], sharded: bool) -> Any:
    if not optimizers:
        return None
    from autoshard.optim.remap import snapshot

    cut = plan.parameters if plan.mesh.tp > 1 else {}
    in_parts = {name for name, one in cut.items() if one.tp_parts is not None}
    return snapshot(model, optimizers, sharded=sharded, in_parts=in_parts)


def _cut(model: nn.Module, applied: Applied, leave: Collection[str]) -> None:
    """Hold every parameter as a DTensor on the tp mesh, and convert at the boundaries."""
    mesh = applied.mesh[AXES[2]]
    axis, slots = Axis(mesh, applied.training.tp_reduce_dtype), _slots(model, applied.plan)
    sequence = CutSequence(axis, applied.plan.sequence) if applied.plan.sequence else None
    styles = {fqn: s for fqn, s in _styles(model, applied, axis, slots, sequence).items() if fqn not in leave}
    # a token of a key is a pattern to torch: names are taken literally
    keys: dict[str, ParallelStyle] = {
        ".".join(glob.escape(step) for step in fqn.split(".")): style for fqn, style in styles.items()
    }
    replace.apply(model, applied.plan.replacements)
    set_attributes(model, applied.plan, InsideCode(axis, slots))
    parallelize_module(model, mesh, keys, src_data_rank=None)
    boundaries = {fqn: one for fqn, one in boundaries_of(model, applied.plan).items() if fqn not in leave}
    _watch_returned(model, boundaries, axis, sequence)
    if applied.plan.cuts_losses:
        model.register_forward_hook(hand_out)
    if sequence is not None:
        texts = [text for one in boundaries.values() for text in one.sequence.values()]
        sequence.install(model, {Conversion.parse(text).dim for text in texts if "S(" in text})
    used = [sums for sums in {id(style.sums): style.sums for style in styles.values()}.values() if sums.owners]
    for sums in used:
        sums.install()
    applied.sums += used
    if used:
        model.register_forward_pre_hook(applied.forget)
        model.register_forward_hook(applied.settle)


def _watch_returned(
    model: nn.Module, boundaries: Mapping[str, ModulePlan], axis: Axis, sequence: CutSequence | None
) -> None:
    """Make whole what the model hands out while it is not."""
    returned = Returned(axis)
    for fqn, one in boundaries.items():
        module = model.get_submodule(fqn)
        returned.watch(module, fqn, one.returns)
        if sequence is not None:
            returned.watch(module, fqn, _part(one.sequence, "returns:"), sequence)
            for path, conversion in _part(one.sequence, "takes:").items():
                returned.watch_argument(module, Argument(module, path, fqn), conversion, sequence)
    if returned.watches:
        returned.install(model)


def _part(texts: Mapping[str, str], prefix: str) -> dict[str, str]:
    return {key.removeprefix(prefix): text for key, text in texts.items() if key.startswith(prefix)}


def _styles(
    model: nn.Module, applied: Applied, axis: Axis, slots: Mapping[str, Slot], sequence: CutSequence | None
) -> dict[str, ModuleStyle]:
    plan = applied.plan
    boundaries, placed = boundaries_of(model, plan), Placed()
    parameters, buffers = parameter_plans(model, plan), buffer_plans(model, plan)
    sums = _sums(model, applied, axis)
    return {
        fqn: ModuleStyle(
            fqn, axis, parameters[fqn], buffers[fqn], boundaries.get(fqn), sums[fqn], slots, placed, sequence
        )
        for fqn, module in model.named_modules()
        if module._parameters or module._buffers or fqn in boundaries
    }


def _sums(model: nn.Module, applied: Applied, axis: Axis) -> dict[str, UnitSums]:
    """Return, by module, the gradient sums of the unit around it."""
    units = Units(model, applied.plan)
    made = {name: UnitSums(axis, applied.sync, units.modules[name], applied.training.sum_dtype) for name in units.names}
    homes = units.homes_of_modules()
    return {fqn: made[homes[id(module)]] for fqn, module in model.named_modules()}


def _slots(model: nn.Module, plan: Plan) -> dict[str, Slot]:
    """Return the shared entries by name; each is emptied when its modules' common parent ends, and the model."""
    users: dict[str, list[str]] = {}
    for fqn, boundary in boundaries_of(model, plan).items():
        inside = [one.share for one in boundary.rewrites if one.share is not None]
        for entry in (*boundary.share.values(), *inside):
            users.setdefault(entry, []).append(fqn)
    slots = {entry: Slot() for entry in users}
    for entry, slot in slots.items():
        for module in {common_parent(model, users[entry]), model}:
            module.register_forward_hook(slot.clear, always_call=True)
    return slots


class _SpoilOnFailure:
    """A block after which the model raises ``Unusable`` on every rank, if the block fails on one."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not isinstance(error, Exception):
            self.model.__dict__["forward"] = Spoiled(Unusable("applying the plan was interrupted half-way"))
            return
        text = None if error is None else f"{type(error).__name__}: {error}"
        failed = [(rank, t) for rank, t in enumerate(gather(text)) if t is not None]
        if not failed:
            return
        rank, text = failed[0]
        unusable = Unusable(
            f"applying the plan failed half-way on rank {rank}", got=text, help="build the model again on every rank"
        )
        self.model.__dict__["forward"] = Spoiled(unusable)
        raise unusable from error


@dataclass(frozen=True)
class Spoiled:
    """The forward of a model that cannot be used."""

    error: Unusable

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Raise the error."""
        raise self.error


def make_mesh(plan: Plan, device_type: str) -> DeviceMesh:
    """Return the device mesh of ``plan``: axes ``dp_replicate``, ``dp_shard``, ``tp``. Every rank calls this."""
    shape = (plan.mesh.dp_replicate, plan.mesh.dp_shard, plan.mesh.tp)
    return init_device_mesh(device_type, shape, mesh_dim_names=AXES)


def ensure_process_group(offload: bool = False) -> None:
    """Make the process group that torchrun's environment describes, and choose the device, if there is none.

    Args:
        offload: whether gradients will lie on the host: then the group works there too.

    Raises:
        NotDistributed: there is neither a process group nor such an environment.
    """
    if dist.is_initialized():
        return
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "LOCAL_RANK") if name not in os.environ]
    if missing:
        raise NotDistributed(
            "there is no process group",
            got=f"{', '.join(missing)} not set",
            help="start with `torchrun --nproc-per-node N script.py`; to only plan, autoshard.plan(model, world=N)",
        )
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    cuda = "cpu:gloo,cuda:nccl" if offload else "nccl"
    dist.init_process_group(cuda if torch.cuda.is_available() else "gloo")


def set_gradient_sync(model: nn.Module, on: bool) -> None:
    """Choose whether the next backwards synchronise gradients over all ranks, or keep them (accumulation).

    Raises:
        InvalidArgument: the model is not parallelized.
    """
    applied = model.__dict__.get(MARK)
    if applied is None:
        raise InvalidArgument("the model is not parallelized", help="call autoshard.parallelize first")
    applied.sync.on = on
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(on)
