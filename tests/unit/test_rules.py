"""Each op rule against arithmetic: cut a factor, run the op on the slices, put the results together, compare."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from brute import Call, check, free_sizes
from torch import Tensor

B, S, D, H, K = 2, 6, 16, 4, 8


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def ids(*shape: int, high: int = 8) -> Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(0))


X = (rand(B, S, D),)
Q, KEY, V = rand(B, H, S, K), rand(B, H, S, K, seed=1), rand(B, H, S, K, seed=2)
W, B1 = rand(12, D), rand(12)

#: name -> (function of inputs and weights, inputs, weights)
CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...], list[Tensor]]] = {
    "linear": (F.linear, X, [W, B1]),
    "linear then row": (lambda x, w, v: F.linear(F.linear(x, w), v), X, [W, rand(D, 12)]),
    "addmm": (lambda x, w, b: torch.addmm(b, x.flatten(0, 1), w), X, [rand(D, 12), B1]),
    "addmm row": (lambda x, w, v, b: torch.addmm(b, (x @ w).flatten(0, 1), v), X, [rand(D, 12), rand(12, D), rand(D)]),
    "baddbmm": (lambda x, w, b: torch.baddbmm(b, x, w), X, [rand(B, D, 12), rand(B, 1, 12)]),
    "matmul": (lambda x, w: x @ w, X, [rand(D, 12)]),
    "matmul vector": (lambda x, w: x @ w, X, [rand(D)]),
    "bmm": (lambda x, w: torch.bmm(x, w), X, [rand(B, D, 12)]),
    "mv": (lambda x, w: torch.mv(x[0], w), X, [rand(D)]),
    "outer": (lambda x, w: torch.outer(x[0, 0], w), X, [rand(12)]),
    "einsum": (lambda x, w, o: torch.einsum("bhsk,hkd->bsd", torch.einsum("bsd,dhk->bhsk", x, w), o), X,
               [rand(D, H, K), rand(H, K, D)]),
    "einsum dots": (lambda x, w: torch.einsum("...d,de->...e", x, w), X, [rand(D, 12)]),
    "embedding": (lambda i, w: F.embedding(i, w), (ids(B, S),), [rand(8, D)]),
    "attention": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), (Q, KEY, V), []),
    "attention mask": (F.scaled_dot_product_attention, (Q, KEY, V, rand(1, H, S, S)), []),
    "attention grouped": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True), (Q, KEY[:, :2], V[:, :2]), []),
    "heads": (lambda x, w: F.linear(x, w).view(B, S, -1, K).transpose(1, 2), X, [rand(H * K, D)]),
    "heads back": (lambda q: q.transpose(1, 2).reshape(B, S, -1), (Q,), []),
    "flatten unflatten": (lambda q: q.flatten(1, 2).unflatten(1, (H, S)), (Q,), []),
    "permute": (lambda q: q.permute(3, 0, 2, 1), (Q,), []),
    "movedim": (lambda q: q.movedim(1, -1), (Q,), []),
    "squeeze": (lambda q: q.unsqueeze(2).squeeze(2), (Q,), []),
    "expand": (lambda q: q.unsqueeze(2).expand(B, H, 3, S, K).reshape(B, 3 * H, S, K), (Q,), []),
    "repeat": (lambda q: q.repeat(1, 3, 1, 2), (Q,), []),
    "repeat_interleave": (lambda q: q.repeat_interleave(3, 1), (Q,), []),
    "chunk": (lambda x: x.chunk(2, -1), X, []),
    "split": (lambda x: x.split([4, 8, 4], -1), X, []),
    "slice": (lambda x: x[..., 4:12] * 2, X, []),
    "slice stride": (lambda x: x[..., ::2] + x[..., 1::2], X, []),
    "narrow": (lambda x: x.narrow(-1, 4, 8), X, []),
    "select unbind": (lambda q: q[:, 0] + q.unbind(1)[1], (Q,), []),
    "rotate half": (lambda q: torch.cat([-q[..., K // 2 :], q[..., : K // 2]], -1), (Q,), []),
    "cat heads": (lambda q, k: torch.cat([q, k], 2), (Q, KEY), []),
    "stack": (lambda q, k: torch.stack([q, k], 1), (Q, KEY), []),
    "gated": (lambda x, w: F.silu(F.linear(x, w).chunk(2, -1)[0]) * F.linear(x, w).chunk(2, -1)[1], X, [rand(24, D)]),
    "glu": (lambda x: F.glu(x), X, []),
    "sum": (lambda x: x.sum(-1) + x.sum(1, keepdim=True)[..., 0], X, []),
    "mean var": (lambda x: (x - x.mean(-1, keepdim=True)) / x.var(-1, keepdim=True), X, []),
    "max": (lambda x: x.amax(1) + x.max(1).values, X, []),
    "max of two": (lambda x, w: torch.min(x, w) + torch.max(x, w), X, [rand(D)]),
    "softmax": (lambda q: q.softmax(-1), (Q,), []),
    "cumsum sort": (lambda x: x.cumsum(1) + x.sort(1).values, X, []),
    "topk": (lambda x: x.topk(4, -1), X, []),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (D,), w, b), X, [rand(D), rand(D)]),
    "rms_norm": (lambda x, w: F.rms_norm(x, (D,), w), X, [rand(D)]),
    "norm per head": (lambda q, w: q * torch.rsqrt(q.pow(2).mean(-1, keepdim=True)) * w, (Q,), [rand(K)]),
    "batch_norm": (lambda x, w: F.batch_norm(x.transpose(1, 2), None, None, w, training=True), X, [rand(D)]),
    "group_norm": (lambda x, w, b: F.group_norm(x.transpose(1, 2), 4, w, b), X, [rand(D), rand(D)]),
    "conv1d": (lambda x, w, b: F.conv1d(x.transpose(1, 2), w, b, padding=1), X, [rand(12, D, 3), rand(12)]),
    "conv2d": (lambda x, w: F.conv2d(x, w, stride=2), (rand(B, 4, 8, 8),), [rand(12, 4, 2, 2)]),
    "conv depthwise": (lambda x, w: F.conv1d(x.transpose(1, 2), w, groups=D, padding=1), X, [rand(D, 1, 3)]),
    "pad": (lambda x: F.pad(x, (0, 0, 1, 2)), X, []),
    "roll flip": (lambda x: x.roll(1, 1) + x.flip(1), X, []),
    "index": (lambda x, i: x[:, i], (*X, ids(S, high=S)), []),
    "index two": (lambda q, i: q[i[:B], :, i[:B]], (Q, ids(S, high=2)), []),
    "gather": (lambda x, i: x.gather(1, i), (*X, ids(B, 3, D, high=S)), []),
    "scatter": (lambda x, i: torch.zeros_like(x).scatter(1, i, x), (*X, ids(B, S, D, high=S)), []),
    "index_add": (lambda x, i: torch.zeros_like(x).index_add(1, i, x), (*X, ids(S, high=S)), []),
    "where": (lambda x: torch.where(x > 0, x, x * 0.1), X, []),
    "zeros": (lambda q: q + torch.zeros(1, H, S, K), (Q,), []),
    "tril": (lambda q, k: (q @ k.transpose(-1, -2)).tril(), (Q, KEY), []),
    "one_hot": (lambda i, w: F.one_hot(i, 8).to(w.dtype) @ w, (ids(B, S),), [rand(8, D)]),
    "complex": (
        lambda q: torch.view_as_real(torch.view_as_complex(q.unflatten(-1, (-1, 2))) * 2j).flatten(3), (Q,), []),
    "cross_entropy": (lambda x, i: F.cross_entropy(x.flatten(0, 1), i.flatten()), (*X, ids(B, S, high=D)), []),
}  # fmt: skip

#: cases in which every extent is needed whole, so that nothing is left to check
NOTHING = {"cross_entropy"}


@pytest.mark.parametrize("name", CASES)
def test_rule_holds_on_slices(name: str) -> None:
    function, inputs, weights = CASES[name]
    checks = check(Call(function, weights), inputs)
    assert (checks == 0) == (name in NOTHING)


def test_heads_are_found_and_head_dim_is_not() -> None:
    def attention(x: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor) -> Tensor:
        a, b, c = (F.linear(x, w).view(B, S, -1, K).transpose(1, 2) for w in (q, k, v))
        y = F.scaled_dot_product_attention(a, b, c, is_causal=True)
        return F.linear(y.transpose(1, 2).reshape(B, S, -1), o)

    model = Call(attention, [rand(H * K, D), rand(H * K, D), rand(H * K, D), rand(D, H * K)])
    sizes = free_sizes(model, X)
    assert H in sizes  # heads
    assert sizes.count(K) == 1  # of the two head dims only the value's may be cut


def test_a_wrong_rule_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    from autoshard.passes.rules import TABLE, pointwise

    monkeypatch.setitem(TABLE, "aten.softmax", pointwise.pointwise)
    with pytest.raises(AssertionError, match=r"aten\.softmax"):
        check(Call(lambda q: q.softmax(-1), []), (Q,))


def test_an_unknown_op_blocks_what_it_touches_and_is_listed() -> None:
    from autoshard.passes.factorise import Factorise
    from autoshard.passes.trace import Trace

    factored = Factorise().run(Trace(given=X).run(Call(lambda x, w: torch.cdist(F.linear(x, w), F.linear(x, w)), [W])))
    assert [target for target, _ in factored.unknown] == ["aten.cdist"]
    value = next(p.value for p in factored.traced.parameters)
    assert value is not None
    assert all(f.blocks for f in factored.single(value)[:1])


def test_a_rule_that_does_not_fit_blocks_and_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    from autoshard.passes.factorise import Factorise
    from autoshard.passes.rules import TABLE
    from autoshard.passes.trace import Trace

    monkeypatch.setitem(TABLE, "aten.relu", lambda op, walk: [])
    factored = Factorise().run(Trace(given=X).run(Call(lambda x, w: F.relu(F.linear(x, w)), [W])))
    assert [target for target, _ in factored.unknown] == ["aten.relu.default"]
    value = next(p.value for p in factored.traced.parameters)
    assert value is not None
    assert factored.single(value)[0].blocks
