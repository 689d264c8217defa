"""Keep logits cut over the vocabulary up to what the model returns.

Reads the placed cuts. Where a result of the model is what a gather over its last dim made whole (``S(-1)->R``), or is
made of that by ops on each element alone, and nothing else reads it, the gather becomes ``S(-1)->D``: a DTensor that
says how it is cut. Leaves every other gather as it was, and says why no result stays cut where none can.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from autoshard.errors import InvalidArgument
from autoshard.ir import Meta, Op, Ref
from autoshard.passes.gathered import ELEMENTWISE, ROLES
from autoshard.passes.states import Conversion, Placed
from autoshard.rewrite.record import CallRewrite

WHOLE, SHARDED = "S(-1)->R", "S(-1)->D"
#: What a DTensor goes through as it is, for the same numbers: no op that reads more than its own element.
_KEEPING = ELEMENTWISE | {"aten.contiguous", "aten.clone"}
_WHY = "the loss works on each rank's part of it"
_LEAVE_OUT = 'leave out logits="sharded"'
_DIVISORS = 6


@dataclass(frozen=True)
class CutLogits:
    """Return the results of a model that are gathered over their last dim as they are cut."""

    def run(self, placed: Placed) -> Placed:
        """Return the placed cuts with logits that stay cut; as they were where there are none, or one is read."""
        ways = _Ways(placed)
        if not ways.kept or ways.blocked:
            return placed
        kept = [c for c in placed.conversions if c.value in ways.kept and c.kind == WHOLE]
        changed = {c: replace(c, kind=SHARDED, why=_WHY) for c in kept}
        return replace(
            placed,
            conversions=tuple(changed.get(c, c) for c in placed.conversions),
            rewrites=_rewritten(placed.rewrites, kept),
            logits=frozenset(value for chain in ways.kept.values() for value in chain),
        )


def refusal(placed: Placed) -> InvalidArgument:
    """Return why no result of a placed model stays cut: where, and what would."""
    ways = _Ways(placed)
    if ways.blocked:
        return _read(ways.blocked[0])
    maker = ways.maker()
    if maker is None:
        return InvalidArgument("the model returns nothing that a loss could be computed of", help=_LEAVE_OUT)
    if any(ref in ways.gathered for ref in maker.refs()):
        return _read(maker)
    degree, size = placed.chosen.degree, _last(maker)
    at = f"{maker.module or 'the model'} ({maker.where})"
    if maker.target in ROLES and size % degree:
        divisors = [str(n) for n in range(1, size + 1) if size % n == 0]
        shown = divisors[:_DIVISORS] + ["..."] * (len(divisors) > _DIVISORS)
        return InvalidArgument(
            f"cannot keep {size} logits cut over {degree} tensor-parallel ranks",
            at=at,
            got=f"tp={degree}, {size} logits; allowed: {', '.join(shown)}",
            help=f"pad the vocabulary to a multiple of tp, take another tp, or {_LEAVE_OUT}",
        )
    return InvalidArgument(
        "the model returns no logits that are cut over their last dim",
        at=at,
        got=f"{maker.target}{_reason(placed, maker)}; allowed: a product with a matrix whose rows are cut over tp",
        help=_LEAVE_OUT,
    )


def _read(op: Op) -> InvalidArgument:
    return InvalidArgument(
        "the model works on its whole logits, so that they cannot stay cut",
        at=f"{op.module or 'the model'} ({op.where})",
        got=f"{op.target}; allowed: ops on each element alone, up to what the model returns",
        help=f"plan with example_inputs without labels and compute the loss behind the model, or {_LEAVE_OUT}",
    )


def _reason(placed: Placed, op: Op) -> str:
    """Return why the matrix of a product is whole, if that is known."""
    role = ROLES.get(op.target)
    weight = op.arguments.get(role.weight) if role else None
    tensor = placed.chosen.index.by_value.get(weight.name) if isinstance(weight, Ref) else None
    why = placed.chosen.whys.get(tensor.fqn) if tensor is not None else None
    return f" (its matrix is whole: {why})" if why else ""


class _Ways:
    """Where gathered values go.

    Attributes:
        gathered: the values that are gathered over their last dim.
        kept: of those, the ones that go to results of the model alone, each with the values on the way.
        blocked: what else reads one that goes to a result.
    """

    def __init__(self, placed: Placed) -> None:
        self.placed = placed
        self.index = placed.chosen.index
        outputs = placed.chosen.factored.traced.outputs
        self.results = {output.value for output in outputs if not output.state}
        self.states = {output.value for output in outputs if output.state}
        self.gathered = {c.value for c in placed.conversions if c.kind == WHOLE}
        self.kept: dict[str, frozenset[str]] = {}
        self.blocked: list[Op] = []
        for value in sorted(self.gathered, key=list(self.index.ops).index):
            self._follow(value)
        self._agree()

    def _follow(self, value: str) -> None:
        chain, pending, others = [value], [value], []
        while pending:
            one = pending.pop()
            for user in self.index.users[one]:
                if _keeps(user, one, self.index.metas):
                    chain.append(user.name)
                    pending.append(user.name)
                else:
                    others.append(user)
        if self.results.isdisjoint(chain):
            return
        if others or not self.states.isdisjoint(chain):
            self.blocked += others[:1] or [self.index.ops[value]]
        else:
            self.kept[value] = frozenset(chain)

    def _agree(self) -> None:
        """A boundary or a text is converted in one way, whenever it runs."""
        places: dict[object, list[Conversion]] = {}
        for c in (c for c in self.placed.conversions if c.kind == WHOLE):
            places.setdefault(c.text or (c.fqn, c.side, c.path), []).append(c)
        for found in places.values():
            values = {c.value for c in found}
            if values & self.kept.keys() and not values <= self.kept.keys():
                other = next(iter(values - self.kept.keys()))
                self.blocked += self.index.users[other][:1] or [self.index.ops[other]]

    def maker(self) -> Op | None:
        """Return the op that makes the first floating-point result, before ops on each element alone."""
        results = (o.value for o in self.placed.chosen.factored.traced.outputs if not o.state)
        metas = self.index.metas
        value = next((v for v in results if v in self.index.ops and v in metas and metas[v].is_float), None)
        op = self.index.ops[value] if value is not None else None
        while op is not None and len(op.refs()) == 1 and _keeps(op, op.refs()[0], metas):
            before = self.index.ops.get(op.refs()[0])
            if before is None:
                break
            op = before
        return op


def _keeps(op: Op, value: str, metas: Mapping[str, Meta]) -> bool:
    """Whether an op works on each element of a value alone, beside numbers."""
    result = op.result
    same = isinstance(result, Meta) and value in metas and result.shape == metas[value].shape
    return op.target in _KEEPING and op.refs() == [value] and same and not op.mutates


def _last(op: Op) -> int:
    return op.result.shape[-1] if isinstance(op.result, Meta) and op.result.shape else 1


def _rewritten(
    rewrites: Mapping[str, tuple[CallRewrite, ...]], kept: list[Conversion]
) -> dict[str, tuple[CallRewrite, ...]]:
    """Return the rewrites with the gathers among them that are no longer made."""
    texts = {(c.text.module, c.text.function, c.text.where, c.text.column) for c in kept if c.text is not None}

    def each(module: str, found: tuple[CallRewrite, ...]) -> Iterator[CallRewrite]:
        for one in found:
            if one.converts and (module, one.function, one.where, one.column) in texts:
                one = replace(one, after=one.after.replace(repr(WHOLE), repr(SHARDED), 1), why=_WHY)
            yield one

    return {module: tuple(each(module, found)) for module, found in rewrites.items()}
