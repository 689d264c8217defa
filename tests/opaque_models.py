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


class StackedExperts(nn.Module):
    """All experts in two parameters, of which each chosen expert takes its own by number; rows of others pass."""

    def __init__(self, experts: int = 4, inner: int = 16, chosen: int = 2, idle: int = 0) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, experts + idle, bias=False)
        self.up = nn.Parameter(torch.randn(experts, 2 * inner, WIDTH) * WIDTH**-0.5)
        self.down = nn.Parameter(torch.randn(experts, WIDTH, inner) * inner**-0.5)
        self.experts, self.chosen = experts, chosen

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, WIDTH)
        weights, index = self.gate(rows).softmax(-1).topk(self.chosen, dim=-1)
        return self.mixed(rows, weights, index).view_as(x)

    def mixed(self, rows: Tensor, weights: Tensor, index: Tensor) -> Tensor:
        out = torch.zeros_like(rows)
        if index.numel() == 0:
            return out
        mask = F.one_hot(index, self.gate.out_features).permute(2, 1, 0)
        for hit in (mask.sum((-1, -2)) > 0).nonzero():
            expert = int(hit.item())
            slot, row = torch.where(mask[expert])
            if row.numel() == 0:
                continue
            mine = rows[row]
            if expert >= self.experts:
                done = mine
            else:
                one, two = F.linear(mine, self.up[expert]).chunk(2, dim=-1)
                done = F.linear(F.silu(one) * two, self.down[expert])
            out.index_add_(0, row, done * weights[row, slot, None])
        return out


class PlainStackedExperts(StackedExperts):
    """No row passes an expert by."""

    def mixed(self, rows: Tensor, weights: Tensor, index: Tensor) -> Tensor:
        out = torch.zeros_like(rows)
        for expert in index.unique().tolist():
            row, slot = (index == expert).nonzero(as_tuple=True)
            one, two = F.linear(rows[row], self.up[expert]).chunk(2, dim=-1)
            out.index_add_(0, row, F.linear(F.silu(one) * two, self.down[expert]) * weights[row, slot, None])
        return out


class BareExperts(PlainStackedExperts):
    """What the loop adds to is returned as it is."""

    def forward(self, x: Tensor) -> Tensor:
        weights, index = self.gate(x).softmax(-1).topk(self.chosen, dim=-1)
        return self.mixed(x, weights, index)


class BranchingExperts(PlainStackedExperts):
    """Which of two ways the rows of an expert go depends on their values."""

    def mixed(self, rows: Tensor, weights: Tensor, index: Tensor) -> Tensor:
        out = super().mixed(rows, weights, index)
        if bool(rows.sum() > 0):
            return out
        return out + rows


class MixedUp(StackedExperts):
    """What is cut for one expert goes through a norm for another: only some of them can see that."""

    def mixed(self, rows: Tensor, weights: Tensor, index: Tensor) -> Tensor:
        out = torch.zeros_like(rows)
        for expert in index.unique().tolist():
            row, slot = (index == expert).nonzero(as_tuple=True)
            hidden = F.linear(rows[row], self.up[expert])
            if expert == 3:
                hidden = F.layer_norm(hidden, hidden.shape[-1:])
            one, two = hidden.chunk(2, dim=-1)
            out.index_add_(0, row, F.linear(F.silu(one) * two, self.down[expert]) * weights[row, slot, None])
        return out


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


class TwoKinds(nn.Module):
    """Rows of the second kind have a feed-forward of their own, of another size: not called where there are none."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = Mlp(WIDTH, 48), Mlp(WIDTH, 16), Norm(WIDTH)

    def forward(self, x: Tensor, second: Tensor | None = None) -> Tensor:
        y = self.first(x) if second is None else torch.where(second[..., None], self.second(x), self.first(x))
        return self.norm(x + y)  # type: ignore[no-any-return]


class Held(nn.Module):
    """The weights of all experts, one below the other, and what is done with those of one."""

    def __init__(self, experts: int, inner: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(experts * inner, WIDTH) * WIDTH**-0.5)
        self.down = nn.Parameter(torch.randn(experts * inner, WIDTH) * inner**-0.5)

    def forward(self, x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return F.silu(x @ up.T) @ down


class FlatExperts(nn.Module):
    """Experts in matrices of another module, taken out of a view by a tensor's own number."""

    def __init__(self, experts: int = 4, inner: int = 16) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, experts, bias=False)
        self.held = Held(experts, inner)
        self.shape, self.experts = (-1, inner, WIDTH), experts

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, WIDTH)
        weights, index = self.gate(rows).softmax(-1).topk(2, dim=-1)
        out = torch.zeros_like(rows)
        mask = F.one_hot(index, self.experts).permute(2, 1, 0)
        for hit in (mask.sum((-1, -2)) > 0).nonzero():
            slot, row = torch.where(mask[hit[0]])
            up, down = (weight.view(self.shape)[hit[0]] for weight in (self.held.up, self.held.down))
            out.index_add_(0, row, self.held(rows[row], up, down) * weights[row, slot, None])
        return out.view_as(x)


class Ragged(nn.Module):
    """Works on pieces of its rows, as long as it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 48), nn.Linear(48, WIDTH)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        pieces = [piece - piece.mean(0) for piece in F.silu(self.up(x)).split(lengths.tolist())]
        return self.down(torch.cat(pieces))  # type: ignore[no-any-return]


class Crossed(Mlp):
    """Takes a second stream, if it is given one."""

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x if other is None else other))  # type: ignore[no-any-return]


class SometimesCrossed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = Crossed(WIDTH, 48), Crossed(WIDTH, 48), Norm(WIDTH)

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        x = self.norm(x + self.first(x))
        return x if other is None else self.second(x, self.norm(other))
