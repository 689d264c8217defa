"""A parameter that every tp rank holds whole, and of which its forward sees this rank's slices, laid end to end.

Its gradient is the slices' own, with zeros elsewhere; ``gradsum`` sums it over the ranks. So it is saved, loaded and
stepped as any whole parameter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from autoshard._torch import run
from autoshard.executor.collectives import Axis
from autoshard.plans import Slices


@dataclass(frozen=True, eq=False)
class View:
    """What one rank sees of a dim.

    Attributes:
        dim: the dim.
        index: shape (seen,), int64: which of its elements; each at most once.
    """

    dim: int
    index: Tensor

    def __call__(self, whole: Tensor) -> Tensor:
        """Return the slices as a new tensor; ``whole`` has the parameter's own shape."""
        if torch.is_grad_enabled() and whole.requires_grad:
            return run(_Select, whole, self.index, self.dim)
        return whole.index_select(self.dim, self.index)


def view_of(slices: Slices, dim: int, axis: Axis) -> View:
    """Return what this rank sees. Computed from ``axis.rank``, so one process can simulate all.

    Args:
        slices: ``(offset, length, ways)``; ``ways`` divides the length and the axis.
        dim: the dim that they make up.
        axis: the tp axis.
    """
    pieces = []
    for offset, length, ways in slices:
        share = length // ways
        number = axis.rank * ways // axis.size
        pieces.append(offset + number * share + torch.arange(share, device=axis.rank.device))
    return View(dim, torch.cat(pieces))


class _Select(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, index: Tensor, dim: int) -> Tensor:
        ctx.index, ctx.dim, ctx.size = index, dim, whole.shape[dim]
        return whole.index_select(dim, index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        shape = list(gradient.shape)
        shape[ctx.dim] = ctx.size
        return gradient.new_zeros(shape).index_copy(ctx.dim, ctx.index, gradient), None, None
