"""Small models with one peculiarity each, for tests of verification."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Any:
        return self.down(F.gelu(self.up(x)))


class Everything(nn.Module):
    """A buffer, an integer buffer, a tie, a frozen weight, dropout, the loss inside, a dict returned."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(32, 16)
        self.up, self.down, self.head = nn.Linear(16, 32), nn.Linear(32, 16), nn.Linear(16, 32)
        self.dropout = nn.Dropout(0.5)
        self.register_buffer("offset", torch.ones(16))
        self.register_buffer("flags", torch.tensor([True, False] * 8))
        self.up.weight.requires_grad_(False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> dict[str, Tensor]:
        x = self.table(ids)
        x = torch.where(self.get_buffer("flags"), x, x + self.get_buffer("offset"))
        x = x + self.down(self.dropout(F.gelu(self.up(x))))
        logits = self.head(x)
        targets = ids if targets is None else targets
        return {"logits": logits, "loss": F.cross_entropy(logits.flatten(0, 1), targets.flatten())}


class Branching(Mlp):
    """Takes a branch that depends on its share; the tracer does not see it."""

    def __init__(self) -> None:
        super().__init__()
        with torch.no_grad():
            self.up.bias.copy_(torch.linspace(-50, 50, 32))

    def forward(self, x: Tensor) -> Any:
        h = F.gelu(self.up(x))
        if not torch.compiler.is_exporting() and h.sum() > 100:  # a branch
            h = h * 2
        return self.down(h)


class Reading(Mlp):
    """Reads a number that depends on its share."""

    def forward(self, x: Tensor) -> Any:
        h = F.gelu(self.up(x))
        scale = 1.0 if torch.compiler.is_exporting() else h.mean().item()  # a number
        return self.down(h * scale)


class Heads(nn.Module):
    """Attention whose sizes are written out where ``literal`` is set, taken from the tensors where not."""

    def __init__(self, literal: bool, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.number, self.size = heads if literal else -1, width // heads

    def forward(self, x: Tensor) -> Any:
        b, s, _ = x.shape
        sizes = (b, s, self.number, self.size)
        q, k, v = (p(x).view(sizes).transpose(1, 2) for p in (self.q, self.k, self.v))  # the sizes
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).reshape(b, s, -1))


class Block(nn.Module):
    """One of several kinds of block; ``number`` is its place and says nothing about its kind."""

    def __init__(self, number: int, inner: int = 64, scale: float = 1.0) -> None:
        super().__init__()
        self.number, self.scale = number, scale
        self.norm = nn.LayerNorm(128)
        self.up, self.down = nn.Linear(128, inner), nn.Linear(inner, 128)

    def forward(self, x: Tensor) -> Any:
        return x + self.down(F.gelu(self.up(self.norm(x)))) * self.scale


class Stack(nn.Module):
    def __init__(self, blocks: list[Block]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = block(x)
        return x


class Mixture(Stack):
    """Needs all its blocks: it mixes what each returns."""

    def __init__(self, blocks: list[Block]) -> None:
        super().__init__(blocks)
        self.mix = nn.Parameter(torch.ones(len(blocks)))

    def forward(self, x: Tensor) -> Any:
        outs = []
        for block in self.blocks:
            x = block(x)
            outs.append(x)
        return (torch.stack(outs, -1) * self.mix).sum(-1)


class WithLambda(Mlp):
    """Cannot be pickled."""

    def __init__(self) -> None:
        super().__init__()
        self.act: Callable[[Tensor], Tensor] = lambda x: F.gelu(x)

    def forward(self, x: Tensor) -> Any:
        return self.down(self.act(self.up(x)))


class FailsOnRanks(Mlp):
    def forward(self, x: Tensor) -> Any:
        if "AUTOSHARD_TEST_FAILS" in os.environ and torch.distributed.is_initialized():
            raise ValueError("no luck on a rank")
        return super().forward(x)


class Stem(nn.Module):
    """A convolution and its batch norm, then tokens: the gradient comes back with its channels last."""

    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False, groups=channels)
        self.norm, self.up, self.out = nn.BatchNorm2d(channels), nn.Linear(channels, channels), nn.LayerNorm(channels)

    def forward(self, image: Tensor) -> Tensor:
        return self.out(self.up(self.norm(self.conv(image)).flatten(2).transpose(1, 2)))  # type: ignore[no-any-return]
