"""One number that every element of every output moves."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def whole(tensor: Tensor) -> Tensor:
    """Return an output as the untouched model gives it: one that says how it is cut is no error."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def objective(found: Mapping[str, Tensor], seed: int) -> Tensor:
    """Return a weighted sum of all elements of all outputs that take a gradient; a scalar in float64.

    Args:
        found: outputs by path.
        seed: of the weights, which are normal: the same seed and shapes give the same ones in every process.
    """
    generator = torch.Generator().manual_seed(seed)
    parts = []
    for _, tensor in sorted(found.items()):
        if tensor.requires_grad:
            weights = torch.randn(tensor.shape, dtype=torch.float64, generator=generator)
            parts.append((tensor * weights).sum())
    return torch.stack(parts).sum()
