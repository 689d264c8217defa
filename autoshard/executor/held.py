"""How a parameter is held, as a DTensor, and how its module's forward reads it, as a plain local tensor.

Every parameter of a module is a DTensor in ``module._parameters``: that is what ``parameters()``, optimizers,
``state_dict`` and FSDP see. The module's own code reads ``self.weight``; the module's class is replaced by a
subclass with one property per parameter, which gives the local tensor: cheap operators, plain attention kernels,
no mixing of kinds. Its gradient is wrapped as a DTensor again on the way back.

``module.weight`` outside of a forward gives the same: the local tensor where only tp cuts it, the DTensor itself
where FSDP has sharded it. Nothing is set and restored around a forward, so an exception leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autoshard._torch import DTensorSpec, local_part, own, run, spec_of, wrap
from autoshard.executor.aliases import Places
from autoshard.executor.collectives import Axis, enter, first_rank
from autoshard.executor.gradsum import UnitSums
from autoshard.executor.slices import View

HELD = "_autoshard_held"


@dataclass(eq=False)
class Held:
    """How one parameter of one module is read.

    Attributes:
        axis: the tp axis; None for a scalar that only the data axes replicate.
        mesh: the mesh on which its DTensor counts as local: the tp mesh, or the whole mesh for a scalar.
        on_first_rank: whether tp rank 0 reads the value and the others zeros: a bias added to a partial sum.
        sums: the unit that sums its partial gradient, or None where the gradient is whole.
        index: its place there.
        in_parts: whether it is cut in parts: then it is read outside of compiled graphs.
        view: the slices that the forward sees of a whole parameter; None where it sees all.
        dtype: what it is read in; None for the dtype it is held in.
    """

    axis: Axis | None
    mesh: DeviceMesh
    on_first_rank: bool = False
    sums: UnitSums | None = None
    index: int = 0
    in_parts: bool = False
    view: View | None = None
    dtype: torch.dtype | None = None
    _known: DTensorSpec | None = None

    def read(self, parameter: Tensor | None) -> Tensor | None:
        """Return what the forward sees: plain, a rank's shape; the DTensor itself while FSDP has it sharded."""
        if not isinstance(parameter, DTensor):
            return parameter
        local = self._summed(parameter) if self.sums is not None else self._local(parameter)
        if self.dtype is not None and local is not parameter:
            local = local.to(self.dtype)
        if self.view is not None and local is not parameter:
            return self.view(local)
        if not self.on_first_rank or self.axis is None or local is parameter:
            return local
        return first_rank(local, self.axis)

    def _local(self, parameter: DTensor) -> Tensor:
        if torch.compiler.is_compiling():
            return parameter.to_local()
        spec = spec_of(parameter)
        if spec is not self._known:
            # equal, not identical: torch hands out specs from caches, with another object for the same mesh
            if spec.mesh != self.mesh:
                return parameter
            self._known = spec
        if not torch.is_grad_enabled() or not parameter.requires_grad:
            return local_part(parameter)
        return run(_Local, parameter)

    def _summed(self, parameter: DTensor) -> Tensor:
        assert self.sums is not None
        cached = None if torch.compiler.is_compiling() else self.sums.cached(self.index, parameter)
        if cached is not None:
            return cached
        local = self._local(parameter)
        return local if local is parameter else enter(local, self.sums.axis)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_known": None}


class _Local(torch.autograd.Function):
    """The local tensor of a DTensor; the gradient becomes a DTensor with the parameter's own placements."""

    @staticmethod
    def forward(ctx: Any, parameter: DTensor) -> Tensor:
        ctx.spec = spec_of(parameter)
        local = local_part(parameter)
        return local.view_as(local)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> DTensor:
        return wrap(own(gradient), ctx.spec)


Lists = tuple[tuple[str, tuple[type, Places]], ...]
Key = tuple[type, tuple[str, ...], Lists]


def hold(module: nn.Module, helds: dict[str, Held], lists: Mapping[str, tuple[type, Places]]) -> None:
    """Let ``module`` read these parameters through ``helds``.

    Args:
        module: its parameters are DTensors already.
        helds: by attribute name.
        lists: attributes that are lists of the parameters (see ``aliases.own_lists``); read through as well.
    """
    for attribute in lists:
        module.__dict__.pop(attribute)
    module.__dict__[HELD] = helds
    module.__class__ = _reading_class((type(module), tuple(helds), tuple(lists.items())))


_classes: dict[Key, type] = {}


def _reading_class(key: Key) -> type:
    """Return the subclass of the first of ``key`` with a property per parameter and list; one per key."""
    base, names, lists = key
    if key not in _classes:
        members: dict[str, Any] = {name: _reader(name) for name in names}
        members |= {attribute: _list_reader(kind, places) for attribute, (kind, places) in lists}
        members |= {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
        made: Any = type(base.__name__, (base,), members)

        def reduce(self: nn.Module, protocol: Any) -> Any:
            return _reduced(super(made, self).__reduce_ex__(protocol), type(self), made, key)

        made.__reduce_ex__ = reduce
        _classes[key] = made
    return _classes[key]


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _read_outside(module: nn.Module, name: str) -> Tensor | None:
    """Read a parameter that the compiler must not see: it would make a plain DTensor of one that is cut in parts."""
    held: Held = module.__dict__[HELD][name]
    return held.read(module._parameters[name])


def _reader(name: str) -> property:
    def read(self: nn.Module) -> Tensor | None:
        if torch.compiler.is_compiling() and self.__dict__[HELD][name].in_parts:
            outside: Tensor | None = _read_outside(self, name)
            return outside
        try:
            parameter = self._parameters[name]
        except KeyError:
            # nn.Module then looks further and names the module in its message
            raise AttributeError(name) from None
        held: Held = self.__dict__[HELD][name]
        return held.read(parameter)

    return property(read)


def _list_reader(kind: type, places: Places) -> property:
    def read(self: nn.Module) -> Any:
        return kind(None if name is None else getattr(self, name) for name in places)

    def write(self: nn.Module, value: Any) -> None:
        """The module refreshes its list after ``to`` and the like; ours is always fresh."""

    return property(read, write)


def _reduced(parts: Any, kind: type, made: type, key: Key) -> Any:
    """Make a pickle that names the module's own class: the subclass cannot be found by name."""
    if isinstance(parts, str) or kind is not made:
        return parts
    rebuild, args, *rest = parts
    base, *others = key
    return (_rebuild, (tuple(others), rebuild, tuple(base if arg is kind else arg for arg in args)), *rest)


def _rebuild(others: tuple[tuple[str, ...], Lists], rebuild: Any, args: tuple[Any, ...]) -> nn.Module:
    module: nn.Module = rebuild(*args)
    module.__class__ = _reading_class((type(module), *others))
    return module
