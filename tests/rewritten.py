"""Models whose sizes no attribute makes local, as people write them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS, SIZE = 32, 4, 8


class Flash(nn.Module):
    """A fused projection, sizes off the input, one attribute that is both whole and cut."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.n_head, self.n_embd, self.dropout = HEADS, WIDTH, dropout
        self.c_attn = nn.Linear(WIDTH, 3 * WIDTH)
        self.c_proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0.0, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))  # type: ignore[no-any-return]


class Eager(nn.Module):
    """Scores with a mask that is sliced to the length at hand."""

    bias: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.n_head, self.n_embd = HEADS, WIDTH
        self.c_attn = nn.Linear(WIDTH, 3 * WIDTH)
        self.c_proj = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("bias", torch.tril(torch.ones(16, 16)).view(1, 1, 16, 16))

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        q, k, v = (t.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for t in (q, k, v))
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf")).softmax(dim=-1)
        return self.c_proj((att @ v).transpose(1, 2).contiguous().view(B, T, C))  # type: ignore[no-any-return]


class Conv1D(nn.Module):
    """A linear with its weight as (in, out); one line of code that is used cut and whole."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf = nf
        self.weight = nn.Parameter(torch.randn(nx, nf) * 0.1)
        self.bias = nn.Parameter(torch.zeros(nf))

    def forward(self, x: Tensor) -> Tensor:
        size_out = x.size()[:-1] + (self.nf,)  # noqa: RUF005
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(size_out)


class Transposed(nn.Module):
    """GPT-2's block: sizes are constants of the file."""

    def __init__(self) -> None:
        super().__init__()
        self.c_attn, self.c_proj = Conv1D(3 * WIDTH, WIDTH), Conv1D(WIDTH, WIDTH)
        self.c_fc, self.c_out = Conv1D(4 * WIDTH, WIDTH), Conv1D(WIDTH, 4 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.c_attn(x).split(WIDTH, dim=2)
        q, k, v = (t.view(*t.shape[:2], HEADS, SIZE).transpose(1, 2) for t in (q, k, v))
        y = (q @ k.transpose(-1, -2)).softmax(-1) @ v
        x = x + self.c_proj(y.transpose(1, 2).reshape(x.shape[0], -1, WIDTH))
        return x + self.c_out(F.gelu(self.c_fc(x)))  # type: ignore[no-any-return]


class Relative(nn.Module):
    """T5's: -1 on the sequence, and a bias of zeros that is made with the number of heads."""

    def __init__(self) -> None:
        super().__init__()
        self.n_heads, self.key_value_proj_dim, self.inner_dim = HEADS, SIZE, WIDTH
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        b, s = x.shape[:2]

        def shape(t: Tensor) -> Tensor:
            return t.view(b, -1, self.n_heads, self.key_value_proj_dim).transpose(1, 2)

        q, k, v = shape(self.q(x)), shape(self.k(x)), shape(self.v(x))
        bias = torch.zeros((1, self.n_heads, s, s), dtype=x.dtype)
        y = (q @ k.transpose(3, 2) + bias).softmax(-1) @ v
        return self.o(y.transpose(1, 2).contiguous().view(b, -1, self.inner_dim))  # type: ignore[no-any-return]


def logged(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def around(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return around


def split_heads(t: Tensor) -> Tensor:
    return t.view(t.shape[0], t.shape[1], HEADS, SIZE).transpose(1, 2)


class Qkv(nn.Module):
    """What the models below share: the projections, and attention on heads."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Helped(Qkv):
    """The sizes are in a free function, and the forward is decorated."""

    @logged
    def forward(self, x: Tensor) -> Tensor:
        return self.attend(*(split_heads(p(x)) for p in (self.q, self.k, self.v)))


class Shaped(Qkv):
    """A shape in a variable; a private name; a call of the base class."""

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:-1], HEADS, SIZE)
        q, k = self.q(x).view(shape).transpose(1, 2), self.k(x).view(*shape).transpose(1, 2)
        return super().attend(q, k, self.__heads(self.v(x), x.shape[1]))

    def __heads(self, v: Tensor, s: int) -> Tensor:
        return v.reshape(-1, s, HEADS, SIZE).transpose(1, 2)


class Inner(Qkv):
    """The sizes are in a function inside the forward."""

    def forward(self, x: Tensor) -> Tensor:
        def heads(p: nn.Module) -> Tensor:
            return p(x).view(x.shape[0], -1, HEADS, SIZE).transpose(1, 2)  # type: ignore[no-any-return]

        return self.attend(*map(heads, (self.q, self.k, self.v)))


class Repeated(Qkv):
    """A mask that is repeated for every head: the number is how often, not a size."""

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = (p(x).view(b, s, -1, SIZE).transpose(1, 2) for p in (self.q, self.k, self.v))
        mask = torch.ones(1, 1, s, s, dtype=torch.bool).tril().repeat(b, HEADS, 1, 1)
        y = (q @ k.mT).masked_fill(~mask, -1e9).softmax(-1) @ v
        return self.o(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Single(Qkv):
    """One head: q and k keep it whole, as it is summed over, and v is cut in it; one method shapes all three."""

    def __init__(self) -> None:
        super().__init__()
        self.n_head, self.n_embd = 1, WIDTH

    def heads(self, t: Tensor) -> Tensor:
        return t.view(t.shape[0], t.shape[1], self.n_head, self.n_embd // self.n_head).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.heads(p(x)) for p in (self.q, self.k, self.v))
        y = (q @ k.mT).softmax(-1) @ v
        return self.o(y.transpose(1, 2).reshape(x.shape[0], -1, self.n_embd))  # type: ignore[no-any-return]


class Counted(Single):
    """The same, with the one size that torch can work out already spent."""

    def heads(self, t: Tensor) -> Tensor:
        return t.view(t.shape[0], -1, self.n_head, self.n_embd // self.n_head).transpose(1, 2)


class Given(Qkv):
    """Two sequences in one call: which of them has a number is not known from the text."""

    def heads(self, t: Tensor, sizes: Any) -> Tensor:
        return t.view(*t.shape[:2], *sizes).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(*(self.heads(p(x), (HEADS, SIZE)) for p in (self.q, self.k, self.v)))


class Nano(nn.Module):
    """A language model of blocks whose sizes no attribute makes local."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(64, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(2) for block in (Flash, Eager, Helped))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for block in self.blocks:
            x = x + block(self.norm(x))
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def from_text() -> nn.Module:
    """Return a model whose source is nowhere."""
    text = """
class Nowhere(Qkv):
    def forward(self, x):
        q, k, v = (p(x).view(x.shape[0], -1, HEADS, SIZE).transpose(1, 2) for p in (self.q, self.k, self.v))
        return self.attend(q, k, v)
"""
    scope: dict[str, Any] = {"Qkv": Qkv, "HEADS": HEADS, "SIZE": SIZE, "__name__": "nowhere"}
    exec(compile(text, "<made>", "exec"), scope)
    made: nn.Module = scope["Nowhere"]()
    return made
