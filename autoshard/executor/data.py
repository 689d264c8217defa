"""What a training loop needs to know about the data axes: which batch is this rank's, and what a mean is.

Ranks that differ only in tp work on one batch. FSDP averages gradients over the data ranks, so a loss that is a mean
over each rank's own tokens weighs tokens unequally as soon as the counts differ; ``token_mean`` does not.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autoshard._torch import run
from autoshard.errors import InvalidArgument
from autoshard.executor.checks import MARK
from autoshard.plans import AXES


def data_rank(model: nn.Module) -> int:
    """Return which share of the data this rank works on: 0 to ``data_world(model) - 1``, equal over tp.

    Raises:
        InvalidArgument: the model is not parallelized.
    """
    mesh = _mesh(model)
    return mesh.get_local_rank(AXES[0]) * mesh[AXES[1]].size() + mesh.get_local_rank(AXES[1])


def data_world(model: nn.Module) -> int:
    """Return the number of shares of the data: ``dp_replicate * dp_shard``.

    Raises:
        InvalidArgument: the model is not parallelized.
    """
    mesh = _mesh(model)
    return mesh[AXES[0]].size() * mesh[AXES[1]].size()


def token_mean(loss_sum: Tensor, num_tokens: int | Tensor, model: nn.Module) -> Tensor:
    """Return the mean loss per token over all data ranks; its backward gives the gradient of just that mean.

    A collective over the data axes. To accumulate over micro-batches give each call its own ``loss_sum`` and, each
    time, this rank's tokens of all of them: the answers then add up to the mean.

    Args:
        loss_sum: this rank's sum of losses, a scalar, equal over tp; also the DTensor that cross-entropy gives on
            logits that are cut.
        num_tokens: how many tokens it sums, ignored ones left out. 0 is fine.
        model: the parallelized model.

    Returns:
        A scalar of the dtype of ``loss_sum``, equal on all ranks; 0 where no rank has a token.

    Raises:
        InvalidArgument: the model is not parallelized, or ``loss_sum`` is no scalar.
    """
    mesh = _mesh(model)
    if loss_sum.dim():
        raise InvalidArgument(
            "the loss to average is not one sum",
            got=f"shape {tuple(loss_sum.shape)}; allowed: ()",
            help='compute it with reduction="sum"',
        )
    if isinstance(loss_sum, DTensor):
        loss_sum = loss_sum.full_tensor()
    count = torch.as_tensor(num_tokens, device=loss_sum.device).detach()
    return run(_TokenMean, loss_sum, count, mesh)


class _TokenMean(torch.autograd.Function):
    """Forward: all losses over all tokens. Backward: data ranks over all tokens, since FSDP divides by the former."""

    @staticmethod
    def forward(ctx: Any, loss_sum: Tensor, count: Tensor, mesh: DeviceMesh) -> Tensor:
        # float64 counts tokens exactly
        totals = torch.stack([loss_sum.detach().double(), count.double()])
        for axis in AXES[:2]:
            if mesh[axis].size() > 1:
                dist.all_reduce(totals, group=mesh.get_group(axis))
        tokens = torch.where(totals[1] == 0, 1.0, totals[1])
        ctx.scale = mesh[AXES[0]].size() * mesh[AXES[1]].size() / tokens
        return (totals[0] / tokens).to(loss_sum.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return (gradient * ctx.scale).to(gradient.dtype), None, None


def _mesh(model: nn.Module) -> DeviceMesh:
    applied = model.__dict__.get(MARK)
    if applied is None:
        raise InvalidArgument("the model is not parallelized", help="call autoshard.parallelize first")
    mesh: DeviceMesh = applied.mesh
    return mesh
