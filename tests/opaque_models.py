"""Models of which some code cannot be traced: it depends on the values of tensors, or raises without them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from models import Attention, Mlp, Norm
from torch import Tensor, nn

WIDTH = 32


class HitExperts(nn.Module):
    """Calls only the experts that some row chose, each with its own rows."""

    def __init__(self, experts: int = 4, inner: int = 16, chosen: int = 2) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, experts, bias=False)
        self.experts = nn.ModuleList(Mlp(WIDTH, inner) for _ in range(experts))
        self.chosen = chosen

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, WIDTH)
        weights, index = self.gate(rows).softmax(-1).topk(self.chosen, dim=-1)
        out = torch.zeros(rows.shape, dtype=x.dtype)
        for expert in index.unique().tolist():
            row, slot = (index == expert).nonzero(as_tuple=True)
            out.index_add_(0, row, self.experts[expert](rows[row]) * weights[row, slot, None])
        return out.view_as(x)


class Literal(Mlp):
    """An expert with the width of a cut in its code."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = (F.silu(self.gate(x)) * self.up(x)).view(-1, 16)
        return self.down(hidden)  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self, moe: nn.Module) -> None:
        super().__init__()
        self.norm, self.moe_norm = Norm(WIDTH), Norm(WIDTH)
        self.attention = Attention(WIDTH)
        self.moe = moe

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.moe(self.moe_norm(x))  # type: ignore[no-any-return]


class MoeDecoder(nn.Module):
    """Token ids in, logits out; hit-only experts in every block."""

    def __init__(self, layers: int = 2, chosen: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, WIDTH)
        self.blocks = nn.ModuleList(Block(HitExperts(chosen=chosen)) for _ in range(layers))
        self.head = nn.Linear(WIDTH, 64, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


class BranchingRoot(nn.Module):
    """The root itself looks at a value, then runs its blocks one after the other."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(Mlp(WIDTH)) for _ in range(layers))
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale if float(x.sum()) > 0 else x / self.scale
        for block in self.blocks:
            x = block(x)
        return x


class NeedsValues(nn.Module):
    """Raises where tensors have no values."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if x.detach().numpy().shape != tuple(x.shape):
            raise ValueError("not the values that belong to the shape")
        return x @ self.weight


class Between(nn.Module):
    """A part that needs values, between two that can be cut."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.part, self.second = Mlp(WIDTH), NeedsValues(), Mlp(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.part(self.first(x)))  # type: ignore[no-any-return]


class Broken(nn.Module):
    """Runs for nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x).view(5, 7)  # type: ignore[no-any-return]


@dataclass
class Answer:
    logits: Tensor
    hidden: tuple[Tensor, ...]


class PlainAnswer:
    def __init__(self, logits: Tensor, hidden: Tensor) -> None:
        self.logits, self.hidden = logits, hidden


class Answers(nn.Module):
    """Returns its answer in one of the ways that people return answers in."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.mlp = Mlp(WIDTH)
        self.head = nn.Linear(WIDTH, 64)
        self.kind = kind

    def forward(self, x: Tensor) -> Any:
        hidden = self.mlp(x)
        logits = self.head(hidden)
        if self.kind == "dict":
            return {"logits": logits, "hidden": (hidden,)}
        if self.kind == "dataclass":
            return Answer(logits, (hidden,))
        if self.kind == "plain class":
            return PlainAnswer(logits, hidden)
        return self._each(logits, hidden)

    @staticmethod
    def _each(*values: Tensor) -> Iterator[Tensor]:
        yield from values
