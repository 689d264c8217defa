"""Keep logits cut over the vocabulary up to the loss that the model computes, or up to what it returns.

Reads the placed cuts. A gather over the last dim (``S(-1)->R``) is not made where its value, and what ops on each
element alone and views that leave the last dim apart make of it, is read by cross-entropies alone: it becomes
``S(-1)->L``, and each rank works out the losses on its share, unless the classes are so few that a gather moves less.
Where the model returns it too, it is gathered there.
Where the model is to return its logits as they are cut, those become ``S(-1)->D``, or ``S(-1)->LD`` where it computes
losses of them as well.
Leaves every other gather as it was, and says why no result stays cut where none can.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from autoshard.dtypes import dtype_bytes
from autoshard.errors import InvalidArgument
from autoshard.ir import Meta, Op, Ref
from autoshard.passes.gathered import ELEMENTWISE, ROLES
from autoshard.passes.states import Conversion, Placed
from autoshard.rewrite.record import CallRewrite

WHOLE, SHARDED, LOSS, BOTH = "S(-1)->R", "S(-1)->D", "S(-1)->L", "S(-1)->LD"
#: What a DTensor goes through as it is, for the same numbers: no op that reads more than its own element.
_KEEPING = ELEMENTWISE | {"aten.contiguous", "aten.clone"}
#: What lays values out anew; the last dim stays apart where it keeps its size, as all others lie before it.
_LAYING = frozenset(f"aten.{n}" for n in "view reshape _unsafe_view flatten unflatten unsqueeze squeeze slice".split())
_LOSS = "aten.cross_entropy_loss"
#: What the ranks reduce of each row: its largest logit, the sum of exponentials and the target's logit.
LOSS_NUMBERS = 3
_WHY = "the loss works on each rank's part of it"
_LEAVE_OUT = 'leave out logits="sharded"'
_DIVISORS = 6


@dataclass(frozen=True)
class CutLogits:
    """Keep values that are gathered over their last dim as they are cut.

    Attributes:
        returned: whether results of the model are to stay cut as well.
    """

    returned: bool = False

    def run(self, placed: Placed) -> Placed:
        """Return the placed cuts with logits that stay cut; as they were where there are none, or one is read."""
        ways = _Ways(placed, self.returned)
        if not ways.kept or (self.returned and ways.blocked):
            return placed
        kept = [c for c in placed.conversions if c.value in ways.kept and c.kind == WHOLE]
        kinds = {c: ways.kept[c.value].kind for c in kept}
        return replace(
            placed,
            conversions=tuple(replace(c, kind=kinds[c], why=_WHY) if c in kinds else c for c in placed.conversions),
            rewrites=_rewritten(placed.rewrites, kinds),
            logits=frozenset(value for way in ways.kept.values() for value in way.values),
            losses=frozenset(loss for way in ways.kept.values() for loss in way.losses),
            joined=frozenset(
                v for way in ways.kept.values() if way.kind == LOSS for v in way.values if v in ways.results
            ),
        )


def refusal(placed: Placed) -> InvalidArgument:
    """Return why no result of a placed model stays cut: where, and what would."""
    ways = _Ways(placed, returned=True)
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


@dataclass(frozen=True)
class _Way:
    """Where one gathered value goes.

    Attributes:
        kind: what becomes of the gather.
        values: the value, and what is made of it that stays cut.
        losses: the cross-entropies that read these.
    """

    kind: str
    values: frozenset[str]
    losses: frozenset[str]


class _Ways:
    """Where gathered values go.

    Attributes:
        gathered: the values that are gathered over their last dim.
        kept: of those, the ones that go to losses, or to results that may stay cut, alone.
        blocked: what else reads one that goes to a result.
    """

    def __init__(self, placed: Placed, returned: bool) -> None:
        self.placed = placed
        self.returned = returned
        self.index = placed.chosen.index
        outputs = placed.chosen.factored.traced.outputs
        self.results = {output.value for output in outputs if not output.state}
        self.states = {output.value for output in outputs if output.state}
        self.gathered = {c.value for c in placed.conversions if c.kind == WHOLE}
        self.kept: dict[str, _Way] = {}
        self.blocked: list[Op] = []
        for value in sorted(self.gathered, key=list(self.index.ops).index):
            self._follow(value)
        self._agree()

    def _follow(self, value: str) -> None:
        metas = self.index.metas
        chain, pending, laid, losses, others = [value], [value], list[Op](), list[Op](), list[Op]()
        while pending:
            one = pending.pop()
            for user in self.index.users[one]:
                if _keeps(user, one, metas) or _lays(user, one, metas):
                    laid += [] if _keeps(user, one, metas) else [user]
                    chain.append(user.name)
                    pending.append(user.name)
                else:
                    (losses if _is_loss(user, one, metas) else others).append(user)
        returned = not self.results.isdisjoint(chain)
        if not losses:
            others = laid + others
        if others or not self.states.isdisjoint(chain):
            if returned:
                self.blocked += others[:1] or [self.index.ops[value]]
        elif (losses and (self.returned or _pays(metas[value]))) or (returned and self.returned):
            kind = SHARDED if not losses else BOTH if returned and self.returned else LOSS
            self.kept[value] = _Way(kind, frozenset(chain), frozenset(op.name for op in losses))

    def _agree(self) -> None:
        """A boundary or a text is converted in one way, whenever it runs."""
        places: dict[object, list[Conversion]] = {}
        for c in (c for c in self.placed.conversions if c.kind == WHOLE):
            places.setdefault(c.text or (c.fqn, c.side, c.path), []).append(c)
        for found in places.values():
            values = {c.value for c in found}
            if len({self.kept[v].kind if v in self.kept else WHOLE for v in values}) == 1:
                continue
            for value in sorted(values & self.kept.keys()):
                if not self.results.isdisjoint(self.kept.pop(value).values):
                    other = next(iter(sorted(values - {value})))
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


def _lays(op: Op, value: str, metas: Mapping[str, Meta]) -> bool:
    """Whether an op lays a value out anew, its last dim as it was."""
    result = op.result
    if op.target not in _LAYING or op.refs() != [value] or op.mutates or not isinstance(result, Meta):
        return False
    before, after = metas[value].shape, result.shape
    # a step would pick other elements of a last dim that keeps its size only where that has one
    return bool(before and after) and after[-1] == before[-1] > 1


def _is_loss(op: Op, value: str, metas: Mapping[str, Meta]) -> bool:
    """Whether an op is a cross-entropy over the last dim of a value whose targets are classes, all of one weight."""
    target = op.arguments.get("target")
    shape = metas[value].shape
    if op.target != _LOSS or not isinstance(target, Ref) or op.refs() != [value, target.name]:
        return False
    given, smooth = metas.get(target.name), op.arguments.get("label_smoothing", 0.0)
    # classes are in dim 1: the last one of two, or the only one
    return given is not None and not given.is_float and given.shape == shape[:-1] and len(shape) <= 2 and not smooth


def _pays(logits: Meta) -> bool:
    """Whether a row is more bytes to gather than its numbers are to reduce: an all-reduce moves them twice."""
    element = dtype_bytes(logits.dtype)
    return logits.shape[-1] * element > 2 * LOSS_NUMBERS * max(element, dtype_bytes("float32"))


def _last(op: Op) -> int:
    return op.result.shape[-1] if isinstance(op.result, Meta) and op.result.shape else 1


def _rewritten(
    rewrites: Mapping[str, tuple[CallRewrite, ...]], kinds: Mapping[Conversion, str]
) -> dict[str, tuple[CallRewrite, ...]]:
    """Return the rewrites with the gathers among them that are no longer made."""
    texts = {
        (c.text.module, c.text.function, c.text.where, c.text.column): kind
        for c, kind in kinds.items()
        if c.text is not None
    }

    def each(module: str, found: tuple[CallRewrite, ...]) -> Iterator[CallRewrite]:
        for one in found:
            kind = texts.get((module, one.function, one.where, one.column))
            if one.converts and kind is not None:
                one = replace(one, after=one.after.replace(repr(WHOLE), repr(kind), 1), why=_WHY)
            yield one

    return {module: tuple(each(module, found)) for module, found in rewrites.items()}
