"""Sums over tp of what each rank has in part, in the dtype of the value or in one that was asked for."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from autoshard._torch import lift
from autoshard.errors import InvalidArgument

#: What sums over tp may run in.
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def check_dtype(dtype: object) -> None:
    """Refuse a dtype that sums over tp cannot run in; None stands for that of the value.

    Raises:
        InvalidArgument: it is none of ``DTYPES``.
    """
    # by identity: numpy's own dtypes raise where they are compared with torch's
    if dtype is not None and all(dtype is not known for known in DTYPES):
        raise InvalidArgument(
            f"no sum over tp runs in {dtype!r}", got=f"{dtype!r}; allowed: None, {', '.join(map(str, DTYPES))}"
        )


def summed_in(value: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """Return what ``value`` is summed in where ``dtype`` is asked for: integers and complex numbers keep their own."""
    return dtype if dtype is not None and value.is_floating_point() else value.dtype


def sum_over(value: Tensor, group: dist.ProcessGroup, dtype: torch.dtype | None = None) -> Tensor:
    """Return the sum over the group in a new buffer, in the dtype of ``value``.

    Args:
        value: any shape.
        group: the ranks.
        dtype: what is sent and summed in; None for that of ``value``.
    """
    kind, mine = summed_in(value, dtype), lift(value)
    # compared by dtype: to a compiler the answer of ``to`` is another object also where nothing is converted
    same = kind == value.dtype
    total = mine.clone(memory_format=torch.contiguous_format) if same else mine.to(kind).contiguous()
    dist.all_reduce(total, group=group)
    return total.to(value.dtype)


def scatter_sum(
    value: Tensor, size: int, dim: int, group: dist.ProcessGroup, dtype: torch.dtype | None = None
) -> Tensor:
    """Return this rank's slice, of equal ones along ``dim``, of the sum over the ranks, in the dtype of ``value``.

    Args:
        value: any shape.
        size: number of ranks.
        dim: the dim.
        group: the ranks.
        dtype: what is sent and summed in; None for that of ``value``.

    Raises:
        InvalidArgument: the dim is not divisible.
    """
    check_divisible(value, size, dim)
    dim %= value.dim()
    wide = lift(value).to(summed_in(value, dtype))
    if dim:
        wide = torch.unflatten(wide, dim, (size, -1)).movedim(dim, 0).flatten(0, 1)
    wide = wide.contiguous()
    mine = torch.empty(wide.shape[0] // size, *wide.shape[1:], dtype=wide.dtype, device=wide.device)
    dist.reduce_scatter_single(mine, wide, group=group)
    return mine.to(value.dtype)


def check_divisible(value: Tensor, size: int, dim: int) -> None:
    """Refuse a dim that ``size`` ranks cannot share.

    Raises:
        InvalidArgument: with its length.
    """
    if value.shape[dim] % size:
        raise InvalidArgument(
            f"cannot cut dim {dim} of a tensor {tuple(value.shape)} over {size} tensor-parallel ranks",
            got=f"{value.shape[dim]} rows; allowed: a multiple of {size}",
        )
