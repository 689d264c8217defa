"""Write every dim of every tensor as an expression over factors, in one forward walk.

Reads the traced graph. Decides which extents are the same, where a cut would make a partial sum, and what forbids one.
Leaves open what is cut: that is the next pass.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from autoshard.ir import Meta, Op, Ref, Traced
from autoshard.passes.factors import Factor
from autoshard.passes.literals import numbers_of
from autoshard.passes.rules import TABLE, Contraction, Literal, Walk
from autoshard.passes.rules.shape import unsupported
from autoshard.passes.rules.walk import Dims, Result


@dataclass(frozen=True)
class Factored:
    """The factors of a traced graph.

    Attributes:
        dims: per value, the factor of each dim; for an op with several results, a list of those.
        contractions: what each op sums over.
        unknown: ``(op, file:line)`` of operators without a rule.
        literals: numbers in the code that must follow a cut.
    """

    traced: Traced
    dims: dict[str, Dims | Sequence[Dims | None] | None]
    contractions: tuple[Contraction, ...]
    unknown: tuple[tuple[str, str], ...]
    literals: tuple[Literal, ...] = ()

    def single(self, name: str) -> Dims:
        """Return the dims of a single-tensor value, or an empty list."""
        found = self.dims.get(name)
        return cast(Dims, found) if found and isinstance(found[0], Factor) else []

    def tensors(self, name: str) -> list[Dims]:
        """Return the dims of each tensor a value holds: one, or one per result."""
        found = self.dims.get(name)
        if not found:
            return []
        if isinstance(found[0], Factor):
            return [cast(Dims, found)]
        return [d for d in found if isinstance(d, list)]


@dataclass(frozen=True)
class Factorise:
    """Walk a traced graph with the table of op rules."""

    def run(self, traced: Traced) -> Factored:
        """Return the factors of ``traced``."""
        Factor._serials = itertools.count()
        walk = Walk(numbers_of(traced))
        for source in traced.sources:
            walk.metas[source.name] = source.meta
            walk.values[source.name] = walk.fresh(source.meta)
            if source.kind != "input":
                walk.weights.add(source.name)
        for op in traced.ops:
            _step(op, walk)
        literals = tuple(walk.literals)
        return Factored(traced, walk.values, tuple(walk.contractions), tuple(walk.unknown), literals)


def _step(op: Op, walk: Walk) -> None:
    walk.op = op
    walk.metas[op.name] = op.result if isinstance(op.result, Meta) else None
    refs = op.refs()
    if refs and all(name in walk.weights for name in refs):
        walk.weights.add(op.name)
    if op.target == "getitem":
        base, index = op.arguments["0"], op.arguments["1"]
        found = walk.values.get(base.name) if isinstance(base, Ref) else None
        walk.values[op.name] = found[index] if found else None
        return
    rule = TABLE.get(op.target)
    if rule is None:
        walk.unknown.append((op.target, op.where))
        rule = unsupported
    try:
        result = rule(op, walk)
        fits = _fits(op, result)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        fits = False  # a call that its rule does not foresee must not end the planning
    if not fits:  # called in a way its rule does not know: nothing it touches is cut
        walk.unknown.append((f"{op.target}.{op.overload}", op.where))
        result = unsupported(op, walk)
    walk.values[op.name] = result


def _fits(op: Op, result: Result) -> bool:
    """Whether a rule's answer has the traced shape: a wrong one must not pass in silence."""
    metas = op.result if isinstance(op.result, tuple) else (op.result,)
    answers: Sequence[object] = (result or []) if isinstance(op.result, tuple) else [result]
    for meta, dims in zip(metas, answers, strict=False):
        got = tuple(d.size for d in (dims if isinstance(dims, list) else []) if isinstance(d, Factor))
        if meta is not None and got != meta.shape:
            return False
    return True
