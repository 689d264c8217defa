"""Collectives that one step really starts on each axis, on the fake process group, beside what the plan says."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from model_workers import tokens
from models import build, token_loss
from simulate import fake_world
from torch import Tensor, nn
from torch.distributed._tools.fake_collectives import CollectiveOp
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from autoshard.executor.execute import apply, make_mesh
from autoshard.executor.training import Training
from autoshard.pipeline import Options, run
from autoshard.plans import AXES, Plan

#: (axis, op): number a step, payload bytes of all of them
Sent = dict[tuple[str, str], tuple[int, int]]
#: the plan's name of each op, and whether its payload is its output
_OPS = {
    "allreduce_": ("all_reduce", False),
    "_allgather_base_": ("all_gather", True),
    "_reduce_scatter_base_": ("reduce_scatter", False),
}


class CountAxes(TorchDispatchMode):
    """Counts collectives of more than one rank by axis and op.

    Args:
        axes: the axis of each process group, by the group's name.
    """

    def __init__(self, axes: Mapping[str, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.axes = axes
        self.sent: Sent = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        if function.namespace in ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor"):
            self._count(function, args)
        return function(*args, **(kwargs or {}))

    def _count(self, function: Any, args: Any) -> None:
        op, output = _OPS[function._schema.name.partition("::")[2]]  # another one is in no plan
        group = CollectiveOp.get_process_group(function, args)
        if group.size() == 1:
            return
        (payload,) = args[0] if isinstance(args[0], list) else [args[0 if output else 1]]
        key = self.axes[str(group.group_name)], op
        count, size = self.sent.get(key, (0, 0))
        self.sent[key] = (count + 1, size + payload.nbytes)


def predicted(plan: Plan) -> Sent:
    """What the plan says, all kinds of a row together."""
    found: Sent = {}
    for row in plan.collectives:
        count, size = found.get((row.axis, row.op), (0, 0))
        found[row.axis, row.op] = (count + row.count, size + row.bytes)
    return found


def started(model: nn.Module, plan: Plan, ids: Tensor, training: Training) -> Sent:
    """Apply the plan on a fake group of its world and count the second step; the first sets FSDP up."""
    with fake_world(plan.mesh.world):
        mesh = make_mesh(plan, "cpu")
        groups = {axis: mesh[axis].get_group() for axis in AXES}
        axes = {str(group.group_name): axis for axis, group in groups.items() if dist.get_world_size(group) > 1}
        apply(model, plan, mesh, training=training)
        token_loss(model(ids), ids).backward()
        with CountAxes(axes) as seen:
            token_loss(model(ids), ids).backward()
    sent: Sent = seen.sent
    return sent


def trainable(name: str, dtype: torch.dtype) -> nn.Module:
    """A model of ``models`` without a cache, which code that runs twice would fill twice."""
    model = build(name, dtype)
    if hasattr(model, "config"):
        model.config.use_cache = False  # type: ignore[union-attr]
    return model


def planned(model: nn.Module, shape: tuple[int, int, int], batch: int = 2, length: int = 8, **options: Any) -> Plan:
    """Plan a model of ``models`` for a mesh ``(dp_replicate, dp_shard, tp)``."""
    ids = torch.zeros(batch, length, dtype=torch.long)
    given: Any = {"input_ids": ids} if hasattr(model, "config") else (ids,)
    asked: dict[str, Any] = {"reshard": True, "sequence_parallel": False, "checkpointing": "none"} | options
    degrees: dict[str, Any] = dict(zip(AXES, shape, strict=True))
    wanted = Options(math.prod(shape), example_inputs=given, batch=batch, sequence=length, **degrees, **asked)
    return run(model, wanted)[0]


def both(
    name: str, shape: tuple[int, int, int], dtype: torch.dtype = torch.float32, **options: Any
) -> tuple[Sent, Sent]:
    """Return what the plan says of a step and what the step starts.

    Args:
        name: of a model of ``models``.
        shape: ``(dp_replicate, dp_shard, tp)``.
        dtype: of the model.
        options: further options of the plan; those that are of training are applied too.
    """
    model = trainable(name, dtype)
    plan = planned(model, shape, **options)
    return predicted(plan), started(model, plan, tokens(model, 2, 8, seed=0), training_of(plan, **options))


def training_of(
    plan: Plan,
    mixed_precision: str | None = None,
    masters: str | None = None,
    tp_reduce_dtype: str | None = None,
    **_: Any,
) -> Training:
    """Return how a model trains under the options that its plan was made with."""
    wide = torch.float32 if masters else None
    summed = None if tp_reduce_dtype is None else getattr(torch, tp_reduce_dtype)
    return Training(mixed_precision, checkpointing=plan.checkpointing, masters=wide, tp_reduce_dtype=summed)
