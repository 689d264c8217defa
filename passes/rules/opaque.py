"""The rule of the operator that stands for code that cannot be traced: all it reads and makes stays whole."""

from __future__ import annotations

from autoshard.ir import Meta, Op
from autoshard.passes.factors import Factor
from autoshard.passes.rules.walk import Dims, Result, Rule, Walk

#: The target of that operator.
OPAQUE = "autoshard.opaque"


def opaque(op: Op, walk: Walk) -> Result:
    """Block every dim of what it takes; what it returns shares no dim with that."""
    for value in op.arguments["taken"]:
        for dim in walk.dims(value):
            walk.block(dim, str(op.arguments["why"]))
    return [_blocked(meta, op, walk) for meta in op.result] if isinstance(op.result, tuple) else None


def _blocked(meta: Meta | None, op: Op, walk: Walk) -> Dims | None:
    if meta is None:
        return None
    dims: list[Factor] = walk.fresh(meta)
    for dim in dims:
        walk.block(dim, str(op.arguments["why"]))
    return dims


RULES: dict[str, Rule] = {OPAQUE: opaque}
