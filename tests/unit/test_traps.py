"""Small models on each of which a plausible analysis gives a wrong number: their plans must be exact."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoshard
from autoshard.passes import localise

B, S, D, H, K = 2, 6, 32, 4, 8
X = (torch.randn(B, S, D, generator=torch.Generator().manual_seed(0)),)


class Parts(nn.Module):
    """Linears by name around a function; its input and its sum with the result are normed."""

    def __init__(self, forward: Callable[..., Any], **sizes: tuple[int, int]) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.body = Body(forward, **sizes)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.body(self.norm(x)))  # type: ignore[no-any-return]


class Body(nn.Module):
    def __init__(self, function: Callable[..., Any], **sizes: tuple[int, int]) -> None:
        super().__init__()
        for name, (n, m) in sizes.items():
            self.add_module(name, nn.Linear(n, m))
        self.conv = nn.Conv1d(16, D, 3, padding=1)
        self.slopes = nn.Parameter(torch.randn(H, generator=torch.Generator().manual_seed(1)))
        self.gates = nn.Parameter(torch.randn(H, K, K, generator=torch.Generator().manual_seed(2)))
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (-1, K)).transpose(1, 2)  # type: ignore[no-any-return]


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def partly_summed(m: Any, x: Tensor) -> Any:
    """Only one part of what the last matmul sums over can be cut."""
    y = attend(*(heads(p(x)) for p in (m.q, m.k, m.v)))
    return m.o(torch.cat([y, x.softmax(-1)], -1))


def square_gates(m: Any, x: Tensor) -> Any:
    """One factor would be both dims of the gates."""
    y = m.q(x).unflatten(-1, (H, K))
    return m.o((y * torch.einsum("bshk,hkj->bshj", y, m.gates).sigmoid()).flatten(2))


def mixed_projection(m: Any, x: Tensor) -> Any:
    """The rows of the one key and value head are whole among cut query rows."""
    q, k, v = m.fused(x).split([H * K, K, K], -1)
    return m.o(attend(heads(q), heads(k).expand(B, H, S, K), heads(v).expand(B, H, S, K)))


def written(m: Any, x: Tensor) -> Any:
    """Keys are put together in place, through views of one base."""
    q, nope, rope = heads(m.q(x)), heads(m.k(x))[..., : K // 2], m.rope(x)[:, None]
    k = q.new_empty(q.shape)
    k[..., : K // 2] = nope
    k[..., K // 2 :] = rope.expand(-1, q.shape[1], -1, -1)
    return m.o(attend(q, k, heads(m.v(x))))


def slopes_by_number(m: Any, x: Tensor) -> Any:
    """A bias of each head follows the head's number."""
    q, k, v = (heads(p(x)) for p in (m.q, m.k, m.v))
    bias = torch.arange(1, q.shape[1] + 1)[:, None, None] * torch.ones(1, S, S)
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias[None] * m.slopes[:, None, None])
    return m.o(y.transpose(1, 2).flatten(2))


def stacked(m: Any, x: Tensor) -> Any:
    """Rows are (3, heads, head_dim): one run of rows is not one rank's heads."""
    q, k, v = m.qkv(x).view(B, S, 3, -1, K).unbind(2)
    return m.o(attend(*(t.transpose(1, 2) for t in (q, k, v))))


def interleaved(m: Any, x: Tensor) -> Any:
    """Rows are (heads, 3, head_dim): every rank's heads are one run of rows."""
    q, k, v = m.qkv(x).view(B, S, -1, 3, K).unbind(3)
    return m.o(attend(*(t.transpose(1, 2) for t in (q, k, v))))


def row_wise_convolution(m: Any, x: Tensor) -> Any:
    """The bias of a convolution over cut channels sits on dim 1, and counts once."""
    return m.conv(m.narrow(x).relu().transpose(1, 2)).transpose(1, 2)


def groups_by_literal(m: Any, x: Tensor) -> Any:
    """The number of groups is written in the code: on a share it would make smaller groups, of the same shape."""
    return m.o(F.group_norm(m.q(x).transpose(1, 2), H).transpose(1, 2))


def mean_by_hand(m: Any, x: Tensor) -> Any:
    """A sum is divided by an extent that a cut would divide too."""
    y = m.q(x).relu()
    return m.o(y / (1 + y.shape[-1]))


def offset_by_literal(m: Any, x: Tensor) -> Any:
    """Where the whole rows begin is written in the code: on a share other rows are there, of the same shape."""
    y = m.fused(x)
    q, k, v = y[..., :32], y[..., 32:40], y[..., 40:48]
    q = q if q.shape[-1] == 32 else q[..., :16]
    return m.o(attend(heads(q), heads(k).expand(B, q.shape[-1] // K, S, K), heads(v).expand(B, q.shape[-1] // K, S, K)))


SQUARE = dict.fromkeys("qkvo", (D, D))
TRAPS: dict[str, Callable[[], nn.Module]] = {
    "partly summed": lambda: Parts(partly_summed, **{**SQUARE, "o": (2 * D, D)}),
    "square gates": lambda: Parts(square_gates, **SQUARE),
    "mixed projection": lambda: Parts(mixed_projection, fused=(D, D + 2 * K), o=(D, D)),
    "written": lambda: Parts(written, **SQUARE, rope=(D, K // 2)),
    "slopes by number": lambda: Parts(slopes_by_number, **SQUARE),
    "stacked": lambda: Parts(stacked, qkv=(D, 3 * D), o=(D, D)),
    "interleaved": lambda: Parts(interleaved, qkv=(D, 3 * D), o=(D, D)),
    "row-wise convolution": lambda: Parts(row_wise_convolution, narrow=(D, 16)),
    "groups by literal": lambda: Parts(groups_by_literal, **SQUARE),
    "mean by hand": lambda: Parts(mean_by_hand, **SQUARE),
    "offset by literal": lambda: Parts(offset_by_literal, fused=(D, D + 2 * K), o=(D, D)),
}


@pytest.mark.parametrize("name", TRAPS)
def test_the_plan_is_exact(name: str) -> None:
    plan = autoshard.plan(TRAPS[name](), world=2, tp=2, example_inputs=X)
    proof = autoshard.verify(TRAPS[name](), plan, example_inputs=X)
    assert proof.ok, proof


@pytest.mark.parametrize("name", ["groups by literal", "mean by hand"])
def test_numbers_in_the_code_are_compared(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(localise, "wrong_number", lambda *_: None)
    plan = autoshard.plan(TRAPS[name](), world=2, tp=2, example_inputs=X)
    assert plan.parameters["body.q.weight"].tp_dim == 0
    assert not autoshard.verify(TRAPS[name](), plan, example_inputs=X).ok
