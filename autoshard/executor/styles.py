"""The ParallelStyle that the executor hands to torch's ``parallelize_module``, one per module.

torch's own styles hold weights of linears and embeddings only, read the first positional argument only, and pay
one all-reduce per projection. This one holds every parameter of any module as a DTensor on the tp mesh, and
converts the arguments and answers that the plan names, by name, however they are passed.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from autoshard._torch import lift, local_part, num_backward_hooks, spec_of, wrap
from autoshard.executor.aliases import own_lists
from autoshard.executor.collectives import Axis, Conversion, take_parts
from autoshard.executor.drawing import draw
from autoshard.executor.gradsum import UnitSums
from autoshard.executor.held import Held, hold
from autoshard.executor.loading import CutBuffer
from autoshard.executor.lookup import RowCutTable
from autoshard.executor.sequence import CutSequence, InBothModes
from autoshard.executor.share import Slot
from autoshard.executor.slices import view_of
from autoshard.paths import Argument, Change, split, update
from autoshard.plans import SEQUENCE, ModulePlan, TensorPlan


@dataclass(eq=False)
class Placed:
    """Tensors that were placed already, by the identity of the original: tied names stay one object."""

    parameters: dict[int, nn.Parameter] = field(default_factory=dict)
    buffers: dict[int, Tensor] = field(default_factory=dict)


@dataclass(eq=False)
class ModuleStyle(ParallelStyle):
    """Hold one module's tensors, and convert at its boundary.

    Attributes:
        fqn: the module's name, for messages.
        axis: the tp axis.
        parameters: the plans of the module's own parameters, by attribute name.
        buffers: the plans of its own buffers that are cut.
        boundary: the plan of its boundary, or None.
        sums: the unit that sums its partial gradients.
        slots: the shared entries, by name.
        placed: what other modules placed already.
        sequence: whether the sequence is cut; None where the plan never cuts it.
    """

    fqn: str
    axis: Axis
    parameters: Mapping[str, TensorPlan]
    buffers: Mapping[str, TensorPlan]
    boundary: ModulePlan | None
    sums: UnitSums
    slots: Mapping[str, Slot]
    placed: Placed
    sequence: CutSequence | None = None

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        helds, lists = {}, own_lists(module)
        for name, plan in self.parameters.items():
            self._place_parameter(module, name, plan)
            helds[name] = Held(self.axis, device_mesh, on_first_rank=plan.read == "first_rank")
            if plan.grad_sum is not None:
                helds[name].sums, helds[name].index = self.sums, self.sums.add(module, name)
            helds[name].in_parts = plan.tp_parts is not None
            if plan.slices is not None and plan.slice_dim is not None:
                helds[name].view = view_of(plan.slices, plan.slice_dim, self.axis)
        for name in [name for name, buffer in module._buffers.items() if buffer is not None]:
            self._place_buffer(module, name, self.buffers.get(name))
            self._save_whole(module, name, self.buffers.get(name))
        if helds:
            hold(module, helds, lists)
        if self.boundary is not None:
            install(module, self.boundary, self.axis, self.slots, self.fqn, self.sequence)
            if self.boundary.draws is not None:
                draw(module, self.boundary.draws, self.axis, self.sequence)
        return module

    def _place_parameter(self, module: nn.Module, name: str, plan: TensorPlan) -> None:
        old = module._parameters[name]
        assert old is not None
        if id(old) not in self.placed.parameters:
            self.placed.parameters[id(old)] = place(old, plan, self.axis)
        module._parameters[name] = self.placed.parameters[id(old)]

    def _place_buffer(self, module: nn.Module, name: str, plan: TensorPlan | None) -> None:
        old = module._buffers[name]
        assert old is not None
        if id(old) not in self.placed.buffers:
            new = old if old.is_meta else old.to(self.axis.mesh.device_type)
            if plan is not None and plan.tp_dim is not None:
                parts = plan.tp_parts or ((0, new.shape[plan.tp_dim]),)
                new = take_parts(new, self.axis.rank.to(new.device), self.axis.size, plan.tp_dim, parts)
            self.placed.buffers[id(old)] = lift(new)
        module._buffers[name] = self.placed.buffers[id(old)]

    def _save_whole(self, module: nn.Module, name: str, plan: TensorPlan | None) -> None:
        if plan is not None and plan.tp_dim is not None and name not in module._non_persistent_buffers_set:
            CutBuffer.of(name, plan, self.axis).install(module)


def place(parameter: nn.Parameter, plan: TensorPlan, axis: Axis) -> nn.Parameter:
    """Return ``parameter`` as a DTensor on the tp mesh, cut as planned or whole; this rank's data, no messages.

    One that is cut in parts holds the rank's slice of each part, laid end to end (see ``parts``).
    """
    dim = plan.tp_dim
    placement = Replicate() if dim is None else Shard(dim)
    whole = parameter.detach().contiguous()
    held = distribute_tensor(whole, axis.mesh, [placement], src_data_rank=None)
    local = local_part(held)
    if dim is not None and plan.tp_parts is not None:
        local = take_parts(whole, axis.rank.to(whole.device), axis.size, dim, plan.tp_parts)
    return like(wrap(lift(local), spec_of(held)), parameter)


def like(held: DTensor, parameter: nn.Parameter) -> nn.Parameter:
    """Return a parameter of ``held`` that keeps ``requires_grad`` and the attributes set on the old one."""
    new = nn.Parameter(held, requires_grad=parameter.requires_grad)
    new.__dict__.update(parameter.__dict__)
    return new


def install(
    module: nn.Module,
    plan: ModulePlan,
    axis: Axis,
    slots: Mapping[str, Slot],
    fqn: str,
    sequence: CutSequence | None = None,
) -> None:
    """Register the hooks that convert at the module's boundary.

    Raises:
        PlanMismatch: the forward has no such argument.
        InvalidArgument: a conversion is unknown.
    """
    boundary, at = Boundary(axis, fqn), fqn or "the model"
    table = None
    if plan.lookup is not None:
        table = RowCutTable(module, plan.lookup, _num_rows(module), axis, fqn)

    def change(side: str, path: str, text: str, slot: Slot | None = None) -> Change:
        def converter(text: str) -> Converter | None:
            conversion = Conversion.parse(text) if text else None
            looked_up = table if conversion is not None and conversion.kind.startswith("P->") else None
            return None if conversion is None else Converter(conversion, axis, slot, looked_up)

        whole, key = converter(text), f"{side}:{path}"
        if sequence is None or key not in plan.sequence:
            assert whole is not None, "only what a cut sequence adds has no conversion without it"
            return whole
        return InBothModes(sequence, f"{at}, {side} {path}".rstrip(), whole, converter(plan.sequence[key]))

    for path in _paths(plan, "inputs"):
        slot = slots.get(plan.share.get(path, ""))
        one = change("inputs", path, plan.inputs.get(path, ""), slot)
        boundary.inputs.append((Argument(module, path, fqn), one))
    for path in _paths(plan, "outputs"):
        one = change("outputs", path, plan.outputs.get(path, ""))
        boundary.outputs.append((split(path), one, f"{at}, answer {path}".rstrip()))
    if boundary.inputs:
        module.register_forward_pre_hook(boundary.enter, with_kwargs=True)
    if boundary.outputs:
        module.register_forward_hook(boundary.leave)
    if table is not None:
        table.install(module)
    if sequence is not None and plan.style == SEQUENCE:
        sequence.guard(module, fqn)


def _paths(plan: ModulePlan, side: str) -> list[str]:
    """Return the paths that are converted on a side, in either mode."""
    found = dict.fromkeys(plan.inputs if side == "inputs" else plan.outputs)
    keys = (key.partition(":") for key in plan.sequence)
    return list(found | dict.fromkeys(path for where, _, path in keys if where == side))


@dataclass(eq=False)
class Converter:
    """A conversion with what it needs: a slot that it shares, or the table whose answer it sums."""

    conversion: Conversion
    axis: Axis
    slot: Slot | None = None
    table: RowCutTable | None = None

    def __call__(self, value: Tensor) -> Tensor:
        """Return ``value`` converted."""
        if self.table is not None:
            value = self.table.zero(value)
        if self.slot is not None:
            return self.slot.convert(value, self.conversion, self.axis)
        return self.conversion(value, self.axis)


@dataclass(eq=False)
class InsideCode:
    """What ``convert`` does in the rewritten code of modules."""

    axis: Axis
    slots: Mapping[str, Slot]

    def __call__(self, kind: str, value: Tensor, share: str | None = None) -> Tensor:
        """Return ``value`` converted, as the text of a conversion says, through a shared entry if one is named."""
        return Converter(_parsed(kind), self.axis, self.slots.get(share or ""))(value)


_parsed = cache(Conversion.parse)


@dataclass(eq=False)
class Boundary:
    """The conversions of one module, as two forward hooks."""

    axis: Axis
    fqn: str
    inputs: list[tuple[Argument, Callable[[Tensor], Tensor]]] = field(default_factory=list)
    outputs: list[tuple[tuple[str, ...], Callable[[Tensor], Tensor], str]] = field(default_factory=list)

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Convert the arguments; a forward pre-hook."""
        if num_backward_hooks(module) and not torch.compiler.is_compiling():
            warnings.warn(
                f"hooks on the gradients of {self.fqn or 'the model'} see this rank's part of those of its inputs, as "
                "they are summed behind it: hook a module that the plan lists no inputs of, such as a block",
                stacklevel=2,
            )
        for argument, change in self.inputs:
            args, kwargs = argument.update(args, kwargs, change)
        return args, kwargs

    def leave(self, module: nn.Module, args: Any, answer: Any) -> Any:
        """Convert the answer; a forward hook."""
        for steps, change, at in self.outputs:
            answer = update(answer, steps, change, at)
        return answer


def _num_rows(module: nn.Module) -> int:
    """Rows of the table on one rank. The checks saw to it that there is one parameter cut by rows."""
    for parameter in module._parameters.values():
        if isinstance(parameter, DTensor) and Shard(0) in spec_of(parameter).placements:
            return local_part(parameter).shape[0]
    raise AssertionError("checked before")
