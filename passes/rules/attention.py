"""Fused attention: batch and head dims of q, k, v and the mask are the same."""

from __future__ import annotations

from autoshard.ir import Op
from autoshard.passes.factors import Factor, product
from autoshard.passes.rules.walk import Result, Rule, Walk


def attention(op: Op, walk: Walk) -> Result:
    """``softmax(q k^T + mask) v``; with grouped heads, query heads are kv heads x group."""
    q, k, v, mask = (walk.dims(op.arguments.get(name)) for name in ("query", "key", "value", "attn_mask"))
    for i in range(len(q) - 2):
        walk.unify(k[i], v[i])
        if q[i].size == k[i].size:
            walk.unify(q[i], k[i])
        elif k[i].size > 1 and q[i].size % k[i].size == 0:
            walk.unify(q[i], product([k[i], Factor(q[i].size // k[i].size)]))
        elif k[i].size > 1:
            walk.block(q[i], "query and key heads do not match")
            walk.block(k[i], "query and key heads do not match")
    walk.unify(k[-2], v[-2])
    walk.unify(q[-1], k[-1])
    walk.block(q[-1], "attention scores sum over it")
    walk.block(k[-2], "attention softmax runs over the keys")
    if op.arguments.get("is_causal"):
        walk.block(q[-2], "a causal mask counts the queries from zero")
    targets = [*q[:-1], k[-2]]
    for back in range(1, len(mask) + 1):
        if mask[-back].size != 1:
            walk.unify(mask[-back], targets[-back])
    return [*q[:-1], v[-1]]


RULES: dict[str, Rule] = {"aten.scaled_dot_product_attention": attention}
