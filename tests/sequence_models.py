"""Small models whose residual stream can be cut along the sequence, or not: each has one peculiarity."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from models import Decoder
from replace_models import Language as TorchEncoder
from torch import Tensor, nn

WIDTH, INNER, HEADS, VOCAB, LONGEST = 16, 32, 4, 24, 64


class SelfAttention(nn.Module):
    """Fused q, k and v with biases; dropout on weights and on the result, as modules and as a number."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = self.qkv(x).view(b, s, 3, -1, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        p = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=p)
        return self.out(y.transpose(1, 2).reshape(b, s, -1))  # type: ignore[no-any-return]


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))  # type: ignore[no-any-return]


class PreNorm(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.attention, self.mlp = SelfAttention(dropout), FeedForward()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attention(self.first(x)))
        return x + self.drop(self.mlp(self.second(x)))  # type: ignore[no-any-return]


class PostNorm(PreNorm):
    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x + self.drop(self.attention(x)))
        return self.second(x + self.drop(self.mlp(x)))  # type: ignore[no-any-return]


class Parallel(PreNorm):
    """One norm, of which attention and feed-forward work side by side."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.second(x + self.attention(h) + self.mlp(h))  # type: ignore[no-any-return]


class Measured(PreNorm):
    """Scales by the length of what it has at hand: a size of the sequence, read from the stream."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + 1 / x.size(1))


class Positioned(PreNorm):
    """Makes positions where the stream is, by its length."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + torch.arange(x.size(1), device=x.device)[:, None] / LONGEST)


class Adding(PreNorm):
    """Adds in place."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.attention(self.first(x))
        h += x
        return h + self.mlp(self.second(h))  # type: ignore[no-any-return]


class Scaled(PreNorm):
    """Parameters of the block itself on the stream, and a frozen one."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__(dropout)
        self.gain = nn.Parameter(torch.rand(WIDTH))
        self.shift = nn.Parameter(torch.rand(WIDTH), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.gain * self.attention(self.first(x))
        return x + self.mlp(self.second(x)) + self.shift  # type: ignore[no-any-return]


class Shared(PreNorm):
    """One norm for both halves."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.first(x))
        return x + self.mlp(self.first(x))  # type: ignore[no-any-return]


class Experts(nn.Module):
    """Every expert sees every token of a flat stream, weighed: a sum over experts and their inner width."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.zeros(4, WIDTH, INNER)), nn.Parameter(torch.zeros(4, INNER, WIDTH))

    def forward(self, tokens: Tensor, weights: Tensor) -> Tensor:
        h = F.gelu(torch.einsum("td,edf->tef", tokens, self.up))
        return (torch.einsum("tef,efd->ted", h, self.down) * weights[..., None]).sum(1)


class Mixture(nn.Module):
    """A router and experts on tokens without a sequence, beside an expert that sees all with one."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts, self.shared = nn.Linear(WIDTH, 4, bias=False), Experts(), FeedForward()

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        tokens = x.reshape(-1, WIDTH)
        y = self.experts(tokens, self.router(tokens).softmax(-1))
        return y.view(b, s, -1) + self.shared(x)  # type: ignore[no-any-return]


class SharedFirst(Mixture):
    """The expert that sees all comes first, and sees them flat too."""

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, WIDTH)
        shared = self.shared(tokens)
        y = self.experts(tokens, self.router(tokens).softmax(-1))
        return (shared + y).view(x.shape)  # type: ignore[no-any-return]


class Mixed(PreNorm):
    def __init__(self, dropout: float = 0.0, kind: type[Mixture] = Mixture) -> None:
        super().__init__(dropout)
        self.mlp = kind()  # type: ignore[assignment]


class Language(nn.Module):
    """Learned positions, blocks, a norm, a head; collects what its blocks return if it is asked to."""

    def __init__(
        self,
        block: Callable[..., nn.Module] = PreNorm,
        layers: int = 2,
        tied: bool = False,
        again: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.table, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LONGEST, WIDTH)
        self.blocks = nn.ModuleList(block(dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.again = again
        if tied:
            self.head.weight = self.table.weight

    def forward(self, ids: Tensor, collect: bool = False) -> Any:
        x = self.table(ids) + self.positions(torch.arange(ids.size(1), device=ids.device))
        seen = [x]
        for block in self.blocks:
            for _ in range(2 if self.again else 1):
                x = block(x)
            seen.append(x)
        logits = self.head(self.norm(x))
        return (logits, *seen) if collect else logits


class SequenceFirst(nn.Module):
    """The stream is (sequence, batch, width)."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.blocks = nn.ModuleList(_Turned() for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids.transpose(0, 1))
        for block in self.blocks:
            x = block(x)
        return self.head(x).transpose(0, 1)  # type: ignore[no-any-return]


class _Turned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp, self.norm = FeedForward(), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))  # type: ignore[no-any-return]


class Routed(nn.Module):
    """A gate that needs all of the stream at once, between blocks that do not."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.blocks = nn.ModuleList([PreNorm(), _Averaging(), PreNorm()])

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


class _Averaging(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + x.mean(1, keepdim=True))  # type: ignore[no-any-return]


#: Models with a stretch, and how many sums a forward takes of a part of the sequence.
CUT: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "decoder": (Decoder, 5),
    "tied decoder": (lambda: Decoder(tied=True), 5),
    "pre-norm": (Language, 6),
    "post-norm": (lambda: Language(PostNorm), 6),
    "parallel": (lambda: Language(Parallel), 6),
    "parameters of blocks": (lambda: Language(Scaled), 6),
    "tokens of experts": (lambda: Language(Mixed), 6),
    "shared expert first": (lambda: Language(partial(Mixed, kind=SharedFirst)), 6),
    "shared norm": (lambda: Language(Shared), 6),
    "tied": (lambda: Language(tied=True), 6),
    "blocks called twice": (lambda: Language(again=True, layers=1), 4),
    "torch's own layers": (TorchEncoder, 5),
    "sequence first": (SequenceFirst, 3),
    "a mean between": (Routed, 5),
}
#: Models in which the code reads a size of the sequence on the stream.
LEFT: dict[str, Callable[[], nn.Module]] = {
    "a length as a number": lambda: Language(Measured),
    "positions by length": lambda: Language(Positioned),
    "residual inside": lambda: Decoder(residual=True),
    "a sum in place": lambda: Language(Adding),
}


class Dropping(PreNorm):
    """Drops on the stream only."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)


def make(name: str) -> nn.Module:
    """Build a model of this file in float64, every value random."""
    torch.manual_seed(0)
    known: dict[str, Callable[[], nn.Module]] = {key: build for key, (build, _) in CUT.items()}
    known |= {**LEFT, "dropping": lambda: Language(Dropping)}
    model = known[name]().double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def ids_of(batch: int, length: int, seed: int = 0) -> Tensor:
    """Token ids, shape (batch, length)."""
    return torch.randint(1, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))
