"""Cross-entropy of logits that are cut over tp along their classes: each rank works on its share of them.

A row's loss is ``log(sum of exp(x - m)) - (x[target] - m)``, ``m`` its largest logit. The largest, the sum and the
target's logit are of a number for each row: these are reduced over the ranks, in two all-reduces, and the logits stay
where they are. Each rank then has the same loss, and its own share of the gradient, ``exp(x - m) / sum`` less 1 at the
target, without any message. The idea is that of Megatron-LM (Shoeybi et al. 2019, "Megatron-LM", section 3).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from autoshard._torch import lift, run

if TYPE_CHECKING:
    from autoshard.executor.collectives import Axis

REDUCTIONS = ("mean", "sum", "none")


def cross_entropy(share: Tensor, target: Tensor, axis: Axis, ignore_index: int, reduction: str) -> Tensor:
    """Return what ``F.cross_entropy`` returns for the whole logits, the same on every rank.

    It has the dtype of ``share``, under autocast at least float32, as torch's has. Logits of less than 4 bytes are
    reduced in float32, whatever else sums over tp run in. A target that is no class
    and is not ignored makes its row NaN: torch raises there, which on a device would have to wait for the values.

    Args:
        share: shape (rows, classes / ranks), this rank's classes; or (classes / ranks,).
        target: shape (rows,), or (), integers, the same on every rank.
        axis: the tp axis.
        ignore_index: targets whose rows do not count.
        reduction: one of ``REDUCTIONS``.
    """
    rows, numbers = share.reshape(-1, share.shape[-1]), target.reshape(-1).long()
    losses = run(_Rows, rows, numbers, axis, ignore_index)
    kind = losses.dtype if torch.is_autocast_enabled(share.device.type) else share.dtype
    if reduction == "none":
        return losses.view(target.shape).to(kind)
    total = losses.sum()
    # of no rows at all, as in torch, a mean is NaN
    return (total if reduction == "sum" else total / (numbers != ignore_index).sum()).to(kind)


class _Rows(torch.autograd.Function):
    """The loss of each row, 0 for one that is ignored; float32, or float64 for float64 logits."""

    @staticmethod
    def forward(ctx: Any, share: Tensor, target: Tensor, axis: Axis, ignore_index: int) -> Tensor:
        wide, size = _wide(share), share.shape[-1]
        largest = lift(wide.amax(-1))
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=axis.group)
        place = target - axis.rank.to(target.device) * size
        mine = (place >= 0) & (place < size)
        place = torch.where(mine, place, 0)
        sums = lift((wide - largest.unsqueeze(-1)).exp_().sum(-1))
        picked = torch.where(mine, wide.gather(-1, place.unsqueeze(-1)).squeeze(-1) - largest, 0)
        both = torch.stack([sums, picked])
        dist.all_reduce(both, group=axis.group)
        log_sum, picked = both[0].log(), both[1]
        counts = target != ignore_index
        known = (target >= 0) & (target < size * axis.size)
        ctx.save_for_backward(share, largest + log_sum, place, mine, counts)
        losses = torch.where(known, log_sum - picked, torch.nan)
        return torch.where(counts, losses, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        share, log_sum, place, mine, counts = ctx.saved_tensors
        made = (_wide(share) - log_sum.unsqueeze(-1)).exp_()
        made.scatter_add_(-1, place.unsqueeze(-1), -mine.to(made.dtype).unsqueeze(-1))
        # an ignored row has no gradient, whatever a mean over no rows would make of it
        made.mul_(torch.where(counts, gradient, 0).unsqueeze(-1))
        return made.to(share.dtype), None, None, None


def _wide(share: Tensor) -> Tensor:
    return share if share.element_size() >= 4 else share.float()
