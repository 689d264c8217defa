"""A gradient scaler whose ranks agree.

torch's own asks only the axes that cut the first of the gradients whether one of them overflowed. Where that one is
whole over tp, as a norm's weight is, a tp rank that overflows skips its step alone, and the ranks part in silence.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from autoshard._torch import UnscalingHook


class GradScaler(UnscalingHook):
    """``torch.amp.GradScaler``, with the same arguments, for sharded models: an overflow is every rank's overflow."""

    def _after_unscaling(self, optimizer: Optimizer, found: Iterable[Tensor]) -> None:
        parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
        grads = (parameter.grad for parameter in parameters)
        meshes: dict[DeviceMesh, None] = {grad.device_mesh: None for grad in grads if isinstance(grad, DTensor)}
        for overflow in found:
            for mesh in meshes:
                for axis in range(mesh.ndim):
                    if mesh.size(axis) > 1:
                        dist.all_reduce(overflow, dist.ReduceOp.MAX, group=mesh.get_group(axis))
