"""Each op rule against arithmetic: cut a factor, run the op on the slices, put the results together, compare."""

from __future__ import annotations

from functools import cache

import pytest
import torch
import torch.nn.functional as F
from brute import Call, Ran, check, free_sizes, run
from rule_cases import CASES, B, D, H, K, Q, S, W, X, rand
from torch import Tensor

from autoshard.passes.factorise import Factorise
from autoshard.passes.factors import Block, Factor, block
from autoshard.passes.rules import TABLE, Rule, pointwise, walk
from autoshard.passes.trace import Trace

#: cases in which every extent is needed whole, so that nothing is left to check
NOTHING = {"cross_entropy", "inverse", "masked_scatter", "histogram", "matrix inverse"}


#: reason to block -> the case that shows it: without that block, arithmetic rejects a cut
NEEDED = {
    "a Fourier transform runs along it": "fourier shift",
    "a causal mask counts the queries from zero": "attention",
    "a convolution runs along it": "conv2d",
    "a diagonal follows its index": "diagonal",
    "a distance needs it whole": "cdist",
    "a loss needs it whole": "cross_entropy",
    "a mask counts the elements it fills": "masked_scatter",
    "a maximum needs it whole": "max",
    "a norm needs it whole": "layer_norm",
    "a product of two activations sums over it": "einsum scores",
    "a reduction needs it whole": "prod",
    "a scan runs along it": "scans",
    "a strided slice": "slice stride odd",
    "a strided slice picks among it": "slice stride",
    "a triangle follows its index": "tril",
    "a variance needs it whole": "var",
    "a vector product mixes it": "cross",
    "an argmax needs it whole": "argmax",
    "an index picks among it": "index",
    "an index picks one of it": "mv",
    "an index writes along it": "scatter",
    "arange numbers it from zero": "arange",
    "attention scores sum over it": "attention",
    "attention softmax runs over the keys": "attention",
    "bags of rows are picked by number": "bag",
    "batch statistics need it whole": "instance_norm",
    "each element has a number of copies": "repeat each",
    "elements are looked up in it": "searchsorted",
    "experts pick their tokens by number": "grouped",
    "eye numbers it from zero": "eye",
    "flip reverses it": "flip",
    "it counts elements by value": "histogram",
    "it holds the two halves of a complex number": "complex",
    "it is the kernel of a convolution": "conv2d",
    "its elements are places in space": "pixel shuffle",
    "linear algebra needs it whole": "matrix inverse",
    "linspace numbers it from zero": "linspace",
    "one_hot numbers it": "one_hot",
    "padding": "pad",
    "places are sampled by coordinate": "grid sample",
    "pooling runs along it": "pooling 1d",
    "resizing runs along it": "resizing 1d",
    "roll moves elements along it": "roll",
    "softmax needs it whole": "softmax",
    "sorting needs it whole": "topk",
    "stack numbers its parts": "stack",
    "unbind takes it apart": "unbind",
    "windows run along it": "windows",
}


@cache
def ran(name: str) -> Ran:
    function, inputs, weights = CASES[name]
    return run(Call(function, weights), inputs)


@pytest.mark.parametrize("name", CASES)
def test_rule_holds_on_slices(name: str) -> None:
    assert not Factorise().run(ran(name).traced).unknown
    checks = check(ran(name))
    assert (checks == 0) == (name in NOTHING)


@pytest.mark.parametrize("why", NEEDED)
def test_without_a_block_a_cut_is_wrong(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = ran(NEEDED[why])

    def drop(factor: Factor, reason: Block) -> None:
        if reason.why != why:
            block(factor, reason)

    monkeypatch.setattr(walk, "block", drop)
    degree = 3 if why == "a vector product mixes it" else 2
    with pytest.raises((AssertionError, RuntimeError, IndexError, ValueError)):  # a wrong number, or torch refuses
        check(case, degree)


def test_every_block_is_shown_to_be_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, None] = {}

    def record(factor: Factor, reason: Block) -> None:
        if factor.size > 1:
            seen[reason.why] = None
        block(factor, reason)

    monkeypatch.setattr(walk, "block", record)
    for name in CASES:
        Factorise().run(ran(name).traced)
    assert set(seen) == set(NEEDED)


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
    monkeypatch.setitem(TABLE, "aten.softmax", pointwise.pointwise)
    with pytest.raises(AssertionError, match=r"aten\.softmax"):
        check(run(Call(lambda q: q.softmax(-1), []), (Q,)))


def test_an_unknown_op_blocks_what_it_touches_and_is_listed() -> None:
    factored = Factorise().run(Trace(given=X).run(Call(lambda x, w: torch.kron(F.linear(x, w), F.linear(x, w)), [W])))
    assert [target for target, _ in factored.unknown] == ["aten.kron"]
    value = next(p.value for p in factored.traced.parameters)
    assert value is not None
    assert all(f.blocks for f in factored.single(value)[:1])


def raising(*_: object) -> list[Factor]:
    return [][0]


@pytest.mark.parametrize("rule", [lambda op, walk: [], raising])
def test_a_rule_that_does_not_fit_blocks_and_is_listed(rule: Rule, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TABLE, "aten.relu", rule)
    factored = Factorise().run(Trace(given=X).run(Call(lambda x, w: F.relu(F.linear(x, w)), [W])))
    assert [target for target, _ in factored.unknown] == ["aten.relu.default"]
    value = next(p.value for p in factored.traced.parameters)
    assert value is not None
    assert factored.single(value)[0].blocks
