"""The sum over tp of gradients that each rank has only in part, one all-reduce per FSDP unit.

A parameter that is whole on every rank but works on cut values has a partial gradient. All such parameters of a
unit are read through one autograd function when the unit's forward starts. Its backward runs once the last of
their gradients is there: it lays them out in one buffer per dtype, sums that over tp, and hands out the pieces. While
gradients are not synchronised (accumulation) it keeps them, and the next synchronised backward adds them before its
sum: once per optimizer step. Under mixed precision it keeps and sums in the dtype of reductions; where one was asked
for over tp, it sums in that.

A read outside the unit's forward finds nothing here and sums on its own (see ``held``).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from autoshard._torch import lift, local_part, reduces_gradients, run_many, spec_of, wrap
from autoshard.executor.collectives import Axis
from autoshard.executor.sums import summed_in

# a parameter and what it is read as, by index
Reads = dict[int, tuple[Tensor, Tensor]]


@dataclass
class Sync:
    """Whether the next backward synchronises gradients, where there is no FSDP to say so."""

    on: bool = True


@dataclass(eq=False)
class UnitSums:
    """The summed parameters of one unit.

    Attributes:
        axis: the tp axis.
        sync: the model's own switch.
        unit: the unit's module, whose forward the reads belong to.
        dtype: the dtype to keep in, and to sum in unless the axis has one; None for that of the gradient.
        owners: the module and name of each parameter; its place in this list is its index. Tied names share one.
    """

    axis: Axis
    sync: Sync
    unit: nn.Module
    dtype: torch.dtype | None = None
    owners: list[tuple[nn.Module, str]] = field(default_factory=list)
    _reads: list[Reads] = field(default_factory=list)
    _kept: dict[int, tuple[DTensor, Tensor]] = field(default_factory=dict)
    _used: bool = False

    def add(self, module: nn.Module, name: str) -> int:
        """Add a parameter, before the unit is used, and return its index."""
        parameter = module._parameters[name]
        for index, (other, known) in enumerate(self.owners):
            if other._parameters[known] is parameter:
                return index
        self.owners.append((module, name))
        return len(self.owners) - 1

    def install(self) -> None:
        """Register the hooks. FSDP puts its own pre-hook in front, so parameters are gathered when ours runs."""
        self.unit.register_forward_pre_hook(self._begin)
        self.unit.register_forward_hook(self._end, always_call=True)

    def cached(self, index: int, parameter: Tensor) -> Tensor | None:
        """Return what the unit's running forward reads ``parameter`` as; None outside of it."""
        found = self._reads[-1].get(index) if self._reads else None
        return found[1] if found is not None and found[0] is parameter else None

    def running(self) -> Reads | None:
        """Return the reads of the unit's running forward, or None outside of it."""
        return self._reads[-1] if self._reads else None

    @contextmanager
    def again(self, reads: Reads) -> Iterator[None]:
        """Run a part of a forward a second time, with the reads it had."""
        self._reads.append(reads)
        try:
            yield
        finally:
            self._reads.pop()

    def forget(self) -> None:
        """At the start of the model's forward, drop what the user has dropped: ``zero_grad`` took its zeros away.

        FSDP keeps the gradients of an accumulation through ``zero_grad``, and so do we then.
        """
        # a forward that is run again in backward uses the unit for nothing
        self._used = False
        if self._kept and reduces_gradients(self.unit) is None:
            self._kept = {i: (p, total) for i, (p, total) in self._kept.items() if p.grad is not None}

    def settle(self) -> None:
        """At the end of the model's forward, sum what was kept where that forward did not use the unit.

        Its backward would not come by here, and the gradient would leak into a later step.
        """
        used, self._used = self._used, False
        if self._kept and not used and torch.is_grad_enabled() and self._synchronises():
            parameters = {index: parameter for index, (parameter, _) in self._kept.items()}
            for index, gradient in self.reduce({}, parameters).items():
                old = parameters[index].grad
                parameters[index].grad = gradient if old is None else old + gradient

    def reduce(self, gradients: dict[int, Tensor], parameters: dict[int, DTensor]) -> dict[int, DTensor]:
        """Return the gradients summed over tp, with what was kept for them and for the others of ``parameters``."""
        kept = self._with_kept(gradients, parameters)
        totals = {index: total.to(summed_in(total, self.axis.reduce_dtype)) for index, total in kept.items()}
        summed: dict[int, DTensor] = {}
        for indices in _by_dtype(totals).values():
            flat = lift(torch.cat([totals[i].reshape(-1) for i in indices]))
            dist.all_reduce(flat, group=self.axis.group)
            pieces = torch.split(flat, [totals[i].numel() for i in indices])
            for index, piece in zip(indices, pieces, strict=True):
                whole = piece.view(totals[index].shape).to(parameters[index].dtype)
                summed[index] = wrap(whole, spec_of(parameters[index]))
        return summed

    def keep(self, gradients: dict[int, Tensor], parameters: dict[int, DTensor]) -> dict[int, DTensor]:
        """Add the gradients to what waits for the next synchronised backward, and return zeros in their place."""
        mine = {index: parameters[index] for index in gradients}
        for index, total in self._with_kept(gradients, mine).items():
            self._kept[index] = (mine[index], total.clone() if total is gradients.get(index) else total)
        return {index: wrap(torch.zeros_like(gradients[index]), spec_of(p)) for index, p in mine.items()}

    def _with_kept(self, gradients: dict[int, Tensor], parameters: dict[int, DTensor]) -> dict[int, Tensor]:
        """Take what was kept for ``parameters``, and return the gradients with it."""
        totals = {index: gradient.to(self.dtype or gradient.dtype) for index, gradient in gradients.items()}
        for index in [i for i in self._kept if i in parameters]:
            _, kept = self._kept.pop(index)
            totals[index] = totals[index] + kept if index in totals else kept
        return totals

    def _synchronises(self) -> bool:
        said = reduces_gradients(self.unit)
        return self.sync.on if said is None else said

    def _begin(self, module: nn.Module, args: Any) -> None:
        self._reads.append({} if torch.compiler.is_compiling() else self._read())

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._reads:
            self._reads.pop()

    def _read(self) -> Reads:
        if not torch.is_grad_enabled():
            return {}
        mine: dict[int, DTensor] = {}
        for index, (module, name) in enumerate(self.owners):
            parameter = module._parameters[name]
            if isinstance(parameter, DTensor) and parameter.requires_grad and self._is_whole(parameter):
                mine[index] = parameter
        if not mine:
            return {}
        self._used = True
        locals_ = run_many(_ReadAll, self, tuple(mine), *mine.values())
        return {i: (p, local) for (i, p), local in zip(mine.items(), locals_, strict=True)}

    def _is_whole(self, parameter: DTensor) -> bool:
        """Whether nothing but the tp axis cuts it: FSDP has gathered it, or never held it."""
        return all(p.is_replicate() for p in spec_of(parameter).placements)


def _by_dtype(gradients: dict[int, Tensor]) -> dict[torch.dtype, list[int]]:
    groups: dict[torch.dtype, list[int]] = {}
    for index in sorted(gradients):
        groups.setdefault(gradients[index].dtype, []).append(index)
    return groups


class _ReadAll(torch.autograd.Function):
    """Local tensors of many whole parameters; the backward sums their gradients together."""

    @staticmethod
    def forward(ctx: Any, sums: UnitSums, indices: tuple[int, ...], *parameters: DTensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.sums, ctx.parameters = sums, dict(zip(indices, parameters, strict=True))
        return tuple(_alias(local_part(p)) for p in parameters)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        given = {i: g for i, g in zip(ctx.parameters, gradients, strict=True) if g is not None}
        if not ctx.sums._synchronises():
            answers = ctx.sums.keep(given, ctx.parameters)
        else:
            answers = ctx.sums.reduce(given, ctx.parameters)
        return (None, None, *(answers.get(i) for i in ctx.parameters))


def _alias(local: Tensor) -> Tensor:
    """A new tensor object on the same memory: autograd writes its own data into what a function returns."""
    return local.view_as(local)
