"""A block that drops attention weights and hidden units, on shares and on whole values, one inside the other."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH, HEADS, P = 16, 4, 0.5


class Attention(nn.Module):
    """Drops weights for its heads in its own code, and in a module inside what it returns whole."""

    def __init__(self, inner_checkpoint: bool = False, fused: bool = False, mixed: bool = False) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.last, self.p = nn.Dropout(P), P
        self.inner_checkpoint, self.fused, self.mixed = inner_checkpoint, fused, mixed

    def forward(self, x: Tensor) -> Tensor:
        if self.inner_checkpoint:
            return checkpoint(self.attend, x, use_reentrant=False)  # type: ignore[no-any-return]
        return self.attend(x)

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for p in (self.q, self.k, self.v))
        p = self.p if self.training else 0.0
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=p)
        else:
            y = F.dropout((q @ k.transpose(-1, -2)).softmax(-1), p) @ v
        out: Tensor = self.last(self.o(y.transpose(1, 2).flatten(2)))
        return F.dropout(out, p) if self.mixed else out


class Block(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.first, self.attention = nn.Dropout(P), Attention(**options)
        self.up, self.down, self.hidden, self.last = (
            nn.Linear(WIDTH, 24),
            nn.Linear(24, WIDTH),
            nn.Dropout(P),
            nn.Dropout(P),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.first(x))
        y: Tensor = self.last(self.down(self.hidden(F.gelu(self.up(x)))))
        return x + y


class Dropping(nn.Module):
    """Two blocks or more; float64, the same values in every process."""

    def __init__(self, blocks: int = 2, raises_in_training: bool = False, **options: Any) -> None:
        super().__init__()
        self.raises_in_training = raises_in_training
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.blocks = nn.ModuleList(Block(**options) for _ in range(blocks))
            self.head = nn.Linear(WIDTH, 5)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.raises_in_training:
            raise ValueError("not today")
        for block in self.blocks:
            x = block(x)
        y: Tensor = self.head(x)
        return y


def example() -> Tensor:
    return torch.ones(2, 3, WIDTH, dtype=torch.float64)
