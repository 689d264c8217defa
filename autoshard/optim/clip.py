"""Gradient clipping that is right on any mix of meshes.

torch's own function stacks the norms of all gradients, which DTensor refuses where they live on different meshes or
beside plain tensors. Here each mesh is reduced by itself; the total norm is the norm of those norms.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from autoshard._torch import local_part
from autoshard.errors import InvalidArgument, NonFiniteGradients


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Scale the gradients in place so that their total norm is at most ``max_norm``.

    A collective over every mesh that a gradient lives on: all ranks call it, with their parameters in the same order.
    Without DTensors it needs no process group. A plain gradient counts once: it is taken to be equal on all ranks.

    Args:
        parameters: parameters, plain or DTensor, on any meshes; those without a gradient are left out.
        max_norm: the largest total norm to leave.
        norm_type: order of the norm; ``float("inf")`` for the largest absolute value.
        error_if_nonfinite: whether a total norm that is nan or infinite is an error.
        foreach: whether to use the foreach kernels; None lets torch choose.

    Returns:
        The total norm before clipping: a plain 0-dim tensor, equal on all ranks.

    Raises:
        NonFiniteGradients: the norm is not finite and ``error_if_nonfinite`` is set.
    """
    groups = _by_mesh([parameters] if isinstance(parameters, Tensor) else parameters)
    norms = [_norm(group, norm_type, foreach) for group in groups]
    total = _combine(norms, norm_type)
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        raise NonFiniteGradients(
            f"the gradients have a norm of {total.item()}, so they cannot be clipped",
            got=f"norm of order {norm_type:g}",
            help="look for the first loss that is not finite, or pass error_if_nonfinite=False",
        )
    for group in groups:
        clip_grads_with_norm_(group, max_norm, total, foreach)
    return total


@torch.no_grad()
def clip_grad_value_(parameters: Tensor | Iterable[Tensor], clip_value: float) -> None:
    """Limit every element of the gradients in place to ``-clip_value`` to ``clip_value``. No communication.

    Args:
        parameters: parameters, plain or DTensor, on any meshes; those without a gradient are left out.
        clip_value: the largest absolute value to leave.

    Raises:
        InvalidArgument: a gradient is a sum that is not computed yet; nothing is clipped.
    """
    parameters = [parameters] if isinstance(parameters, Tensor) else parameters
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    for grad in grads:
        if isinstance(grad, DTensor) and any(placement.is_partial() for placement in grad.placements):
            raise InvalidArgument(
                "a gradient is a partial sum on each rank: limiting the summands does not limit their sum",
                got=f"shape {tuple(grad.shape)}, {grad.placements}",
                help="redistribute the gradient first",
            )
    for grad in grads:
        (local_part(grad) if isinstance(grad, DTensor) else grad).clamp_(-clip_value, clip_value)


def _by_mesh(parameters: Iterable[Tensor]) -> list[list[Tensor]]:
    """Group the parameters that have a gradient by its mesh, plain ones together, in order of first sight."""
    groups: dict[DeviceMesh | None, list[Tensor]] = {}
    for parameter in parameters:
        grad = parameter.grad
        if grad is not None:
            groups.setdefault(grad.device_mesh if isinstance(grad, DTensor) else None, []).append(parameter)
    return list(groups.values())


def _norm(group: list[Tensor], norm_type: float, foreach: bool | None) -> Tensor:
    grads = [parameter.grad for parameter in group if parameter.grad is not None]
    norm = get_total_norm(grads, norm_type, False, foreach)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def _combine(norms: list[Tensor], norm_type: float) -> Tensor:
    if not norms:
        return torch.tensor(0.0)
    if len(norms) == 1:
        return norms[0]
    return get_total_norm(norms, norm_type)
