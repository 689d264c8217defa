"""What is saved and loaded of cut tensors: whole and in order, however they are held.

A buffer is a plain tensor of a rank's share; its entry in a state dict is a DTensor that says so. A parameter that is
cut in parts says it itself; one that is loaded by assignment is put in order here.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from autoshard._torch import local_part, when_sharded
from autoshard.executor.collectives import Axis, take_parts
from autoshard.executor.inparts import InParts, is_canonical, mark, put_in_order
from autoshard.executor.match import parameter_plans
from autoshard.executor.parts import Order
from autoshard.plans import Plan, TensorPlan


def hold_in_parts(model: nn.Module, plan: Plan, leave: Collection[str] = ()) -> None:
    """Let every parameter that is cut in parts be an ``InParts``, with its gradient and what FSDP makes of it.

    Args:
        model: sharded by tp, and by FSDP where there is any.
        plan: the plan.
        leave: names of modules whose parameters others hold.
    """
    orders: dict[int, Order] = {}
    modules = dict(model.named_modules())
    for fqn, tensors in parameter_plans(model, plan).items():
        names = [name for name, tensor in tensors.items() if tensor.tp_parts is not None and fqn not in leave]
        for name in names:
            tensor, parameter = tensors[name], modules[fqn]._parameters[name]
            assert isinstance(parameter, DTensor) and tensor.tp_dim is not None and tensor.tp_parts is not None
            orders[id(parameter)] = Order(tensor.tp_dim, tensor.tp_parts, plan.mesh.tp)
            mark(parameter, orders[id(parameter)])
        if names:
            modules[fqn].register_load_state_dict_pre_hook(OrderLoaded(tuple(names)))
    when_sharded(model, {key: Marker(order) for key, order in orders.items()})


@dataclass(frozen=True)
class Marker:
    """Marks what FSDP makes of a parameter."""

    order: Order

    def __call__(self, tensor: DTensor) -> DTensor:
        """Mark ``tensor``, in place."""
        return mark(tensor, self.order)


@dataclass(frozen=True)
class OrderLoaded:
    """Puts loaded parameters in order; a hook before ``load_state_dict``, where that assigns instead of copying.

    Attributes:
        names: attributes of the module.
    """

    names: tuple[str, ...]

    def __call__(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        """Replace the entries that are DTensors in canonical order."""
        for name in self.names:
            loaded, parameter = state_dict.get(prefix + name), module._parameters.get(name)
            if isinstance(loaded, DTensor) and is_canonical(loaded) and isinstance(parameter, InParts):
                state_dict[prefix + name] = put_in_order(loaded, parameter)


@dataclass(frozen=True, eq=False)
class CutBuffer:
    """How one buffer is cut, for the two hooks of its module that save and load it.

    Attributes:
        name: its attribute.
        shape: of the whole, in elements.
        dim: the cut dim.
        order: where it is cut in parts.
        axis: the tp axis.
    """

    name: str
    shape: tuple[int, ...]
    dim: int
    order: Order
    axis: Axis

    @staticmethod
    def of(name: str, plan: TensorPlan, axis: Axis) -> CutBuffer:
        """Return it for a buffer that ``plan`` cuts."""
        assert plan.tp_dim is not None
        parts = plan.tp_parts or ((0, plan.shape[plan.tp_dim]),)
        return CutBuffer(name, plan.shape, plan.tp_dim, Order(plan.tp_dim, parts, axis.size), axis)

    def install(self, module: nn.Module) -> None:
        """Register the hooks."""
        module.register_state_dict_post_hook(SaveBuffer(self))
        module.register_load_state_dict_pre_hook(LoadBuffer(self))


@dataclass(eq=False)
class SaveBuffer:
    """Lets a state dict have a DTensor on a buffer's memory; torch keeps a flag on the hook, so it is not frozen."""

    buffer: CutBuffer

    def __call__(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any) -> None:
        """Replace the entry."""
        mine, key = self.buffer, prefix + self.buffer.name
        share = state_dict.get(key)
        if isinstance(share, Tensor) and not isinstance(share, DTensor):
            entry = DTensor.from_local(share.detach(), mine.axis.mesh, [Shard(mine.dim)], run_check=False)
            state_dict[key] = mark(entry, mine.order) if len(mine.order.parts) > 1 else entry


@dataclass(eq=False)
class LoadBuffer:
    """Takes this rank's share of a buffer from what is loaded: a DTensor, or the whole tensor."""

    buffer: CutBuffer

    def __call__(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        """Replace the entry; every rank calls this."""
        mine, key = self.buffer, prefix + self.buffer.name
        whole = state_dict.get(key)
        if isinstance(whole, InParts) and whole.order == mine.order:
            state_dict[key] = local_part(whole)
            return
        if isinstance(whole, DTensor):
            whole = whole.full_tensor()
        if isinstance(whole, Tensor) and tuple(whole.shape) == mine.shape:
            rank = mine.axis.rank.to(whole.device)
            state_dict[key] = take_parts(whole, rank, mine.axis.size, mine.dim, mine.order.parts)
