"""A plain MLP: the smallest model with something to cut."""

from __future__ import annotations

from torch import Tensor, nn


class MLP(nn.Module):
    """Features (..., width) to features (..., width), through a wider layer."""

    def __init__(self, width: int = 1024, inner: int = 4096) -> None:
        super().__init__()
        self.up = nn.Linear(width, inner)
        self.act = nn.GELU()
        self.down = nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))
