"""Conversions between the states of a value on the tp axis, as autograd functions on plain local tensors.

**R** is the same on every rank, **V** the same with a partial gradient, **S(d)** cut along dim ``d``, **P** a
partial sum. Each conversion is linear, and its backward is the conversion that its transpose names:

=========  ====================  ====================
           forward               backward
=========  ====================  ====================
R->V       identity              all-reduce
P->R       all-reduce            identity
P->S(d)    reduce-scatter        all-gather along d
S(d)->R    all-gather along d    local slice
S(d)->V    all-gather along d    reduce-scatter
R->S(d)    local slice           all-gather along d
R->P       rank 0 keeps it       identity
V->P       divide by the ranks   divide by the ranks
A->R       mean over the ranks   divide by the ranks
S(d)->D    a DTensor, Shard(d)   its local part
S(d)->L    the same, for a loss  its local part
S(d)->LD   the same, for both    its local part
=========  ====================  ====================

**A** is a part of a mean, each rank's own of an equal share. ``P->V`` and ``A->V`` are made whole and enter at once:
``P->R`` or ``A->R``, then ``R->V``. **D** is a DTensor of the tp mesh with ``[Shard(d)]``, for the loss behind the
model; where no gradients are recorded ``S(d)->D`` is ``S(d)->R``: what generates and evaluates sees whole values.
**L** is such a DTensor for losses inside the model, which makes it whole where it returns it (``cut_logits``); **LD**
is for both, and returned as D.

``R->V[a:b]`` concerns the last dim's elements ``a`` to ``b`` only: the others stay R.

Reductions run in ``Axis.reduce_dtype``, or in the dtype of the value, on a buffer of their own: autograd or the caller
may hold what came in. Their answer has the dtype of the value.
Nothing branches on the rank: what depends on it is computed from ``Axis.rank``, so one process can simulate all.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from autoshard._torch import lift, run
from autoshard.errors import InvalidArgument
from autoshard.executor.cut_logits import Share, keep_cut
from autoshard.executor.sums import check_divisible, scatter_sum, sum_over, summed_in

KINDS = (
    "R->V", "P->R", "P->V", "P->S(d)", "A->R", "A->V", "S(d)->R", "S(d)->V", "R->S(d)", "R->P", "V->P", "S(d)->D",
    "S(d)->L", "S(d)->LD",
)  # fmt: skip
#: Those that leave a value cut where gradients are recorded.
KEEPING_CUT = ("S(d)->D", "S(d)->L", "S(d)->LD")
_SPAN = re.compile(r"^R->V\[(\d+):(\d+)\]$")


class Axis:
    """The tp axis as seen from one rank.

    Attributes:
        mesh: the 1-D mesh.
        rank: shape (1,), int64: this rank's index on the axis.
        reduce_dtype: what sums over the axis run in; None for the dtype of the value.
    """

    def __init__(self, mesh: DeviceMesh, reduce_dtype: torch.dtype | None = None) -> None:
        self.mesh = mesh
        self.reduce_dtype = reduce_dtype
        numbers = torch.arange(mesh.size(), device=mesh.device_type)
        self.rank = distribute_tensor(numbers, mesh, [Shard(0)], src_data_rank=None).to_local()

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.mesh.size()

    @cached_property
    def group(self) -> dist.ProcessGroup:
        """The process group, made by the mesh."""
        return self.mesh.get_group()

    def __deepcopy__(self, memo: dict[int, Any]) -> Axis:
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {"mesh": self.mesh, "rank": self.rank, "reduce_dtype": self.reduce_dtype}


@dataclass(frozen=True)
class Conversion:
    """A conversion.

    Attributes:
        kind: such as ``R->V``.
        dim: the cut dim of ``S(d)``.
        span: for ``R->V``, the first and the end of the elements of the last dim that it concerns; None for all.
    """

    kind: str
    dim: int = 0
    span: tuple[int, int] | None = None

    @staticmethod
    def parse(text: str) -> Conversion:
        """Read ``"R->V"``, ``"S(2)->R"`` or ``"R->V[32:48]"``.

        Raises:
            InvalidArgument: no such conversion.
        """
        if span := _SPAN.match(text.replace(" ", "")):
            return Conversion("R->V", span=(int(span[1]), int(span[2])))
        dims = re.findall(r"S\((-?\d+)\)", text)
        kind = re.sub(r"S\(-?\d+\)", "S(d)", text.replace(" ", ""))
        if kind not in KINDS:
            raise InvalidArgument(f"no conversion is called {text!r}", got=f"{text!r}; allowed: {', '.join(KINDS)}")
        return Conversion(kind, int(dims[0]) if dims else 0)

    def __call__(self, value: Tensor, axis: Axis) -> Tensor:
        """Convert ``value``, any shape; ``S(d)`` needs dim ``d`` divisible by the axis."""
        if self.kind == "R->V":
            return enter(value, axis) if self.span is None else _enter_span(value, axis, *self.span)
        if self.kind == "V->P":
            return value / axis.size
        if self.kind in ("P->V", "A->V"):
            return enter(Conversion(self.kind[:-1] + "R")(value, axis), axis)
        if self.kind == "A->R":
            share = value.to(summed_in(value, axis.reduce_dtype)) / axis.size
            return run(_AllReduce, share, axis.group, axis.reduce_dtype).to(value.dtype)
        if self.kind == "P->R":
            return run(_AllReduce, value, axis.group, axis.reduce_dtype)
        if self.kind == "P->S(d)":
            return run(_Scatter, value, axis.size, self.dim, axis.group, axis.reduce_dtype)
        if self.kind in KEEPING_CUT and torch.is_grad_enabled():
            # cross-entropy looks for its own dim, counted from the front
            cut = DTensor.from_local(value, axis.mesh, [Shard(self.dim % value.dim())], run_check=False)
            whole, returned = Conversion("S(d)->R", self.dim), self.kind == "S(d)->LD"
            return cut if self.kind == "S(d)->D" else keep_cut(cut, Share(axis, whole, returned))
        if self.kind in ("S(d)->R", *KEEPING_CUT):
            return run(_Gather, value, axis.rank, axis.size, self.dim, axis.group)
        if self.kind == "S(d)->V":
            return run(_GatherIn, value, axis.size, self.dim, axis.group, axis.reduce_dtype)
        if self.kind == "R->S(d)":
            return run(_Slice, value, axis.rank, axis.size, self.dim, axis.group)
        return first_rank(value, axis)


def enter(value: Tensor, axis: Axis) -> Tensor:
    """R->V: identity, and one all-reduce of the gradient; no node at all where no gradient can flow."""
    if not torch.is_grad_enabled() or not value.requires_grad:
        return value
    return run(_Enter, value, axis.group, axis.reduce_dtype)


def _enter_span(value: Tensor, axis: Axis, start: int, end: int) -> Tensor:
    """R->V of elements ``start`` to ``end`` of the last dim."""
    if not 0 <= start < end <= value.shape[-1]:
        raise InvalidArgument(
            f"elements {start} to {end} of a last dim of {value.shape[-1]} do not exist", got=str(tuple(value.shape))
        )
    before, part, after = torch.split(value, [start, end - start, value.shape[-1] - end], dim=-1)
    return torch.cat([before, enter(part, axis), after], dim=-1)


def first_rank(value: Tensor, axis: Axis) -> Tensor:
    """R->P: the value on tp rank 0, zeros elsewhere; the gradient passes whole on every rank."""
    return run(_FirstRank, value, axis.rank)


def take_slice(value: Tensor, rank: Tensor, size: int, dim: int) -> Tensor:
    """Return slice ``rank`` of ``size`` equal ones along ``dim``, as a new tensor.

    Raises:
        InvalidArgument: the dim is not divisible.
    """
    check_divisible(value, size, dim)
    dim %= value.dim()
    return torch.unflatten(value, dim, (size, -1)).index_select(dim, rank).squeeze(dim)


def take_parts(value: Tensor, rank: Tensor, size: int, dim: int, parts: Sequence[tuple[int, int]]) -> Tensor:
    """Return slice ``rank`` of each part ``(offset, length)`` of ``dim``, laid end to end, as a new tensor."""
    pieces = [value.narrow(dim, offset, length) for offset, length in parts]
    return torch.cat([take_slice(piece, rank, size, dim) for piece in pieces], dim)


def gather_slices(value: Tensor, size: int, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Return the equal slices of all ranks, joined along ``dim``."""
    dim %= value.dim()
    value = lift(value).contiguous()
    stacked = torch.empty(size * value.shape[0], *value.shape[1:], dtype=value.dtype, device=value.device)
    dist.all_gather_single(stacked, value, group=group)
    if dim == 0:
        return stacked
    joined = torch.unflatten(stacked, 0, (size, -1)).movedim(0, dim).flatten(dim, dim + 1)
    # behind dims of one element nothing had to move: joined is a view, which autograd lets nobody write into
    return joined.clone() if value.shape[:dim].numel() == 1 else joined


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, group: dist.ProcessGroup, dtype: torch.dtype | None) -> Tensor:
        ctx.group, ctx.dtype = group, dtype
        return value.view_as(value)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return sum_over(gradient, ctx.group, ctx.dtype), None, None


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, group: dist.ProcessGroup, dtype: torch.dtype | None) -> Tensor:
        return sum_over(value, group, dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient, None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, rank: Tensor, size: int, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.rank, ctx.size, ctx.dim = rank, size, dim
        return gather_slices(value, size, dim, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        return take_slice(gradient, ctx.rank, ctx.size, ctx.dim), None, None, None, None


class _GatherIn(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, value: Tensor, size: int, dim: int, group: dist.ProcessGroup, dtype: torch.dtype | None
    ) -> Tensor:
        ctx.size, ctx.dim, ctx.group, ctx.dtype = size, dim, group, dtype
        return gather_slices(value, size, dim, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        return scatter_sum(gradient, ctx.size, ctx.dim, ctx.group, ctx.dtype), None, None, None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, value: Tensor, size: int, dim: int, group: dist.ProcessGroup, dtype: torch.dtype | None
    ) -> Tensor:
        ctx.size, ctx.dim, ctx.group = size, dim, group
        return scatter_sum(value, size, dim, group, dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        return gather_slices(gradient, ctx.size, ctx.dim, ctx.group), None, None, None, None


class _Slice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, rank: Tensor, size: int, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.size, ctx.dim, ctx.group = size, dim, group
        return take_slice(value, rank, size, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        return gather_slices(gradient, ctx.size, ctx.dim, ctx.group), None, None, None, None


class _FirstRank(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, rank: Tensor) -> Tensor:
        return torch.where(rank == 0, value, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None
