"""What an op rule may do: read the dims of values, unify and block factors, record contractions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from autoshard.ir import Meta, Op, Ref
from autoshard.passes.factors import Block, Factor, block
from autoshard.passes.unify import unify

Dims = list[Factor]
Result = Dims | Sequence[Dims | None] | None
Rule = Callable[[Op, "Walk"], Result]


@dataclass(frozen=True)
class Contraction:
    """A factor that an op sums over.

    Attributes:
        op: the op's name.
        factor: what is summed over.
        kind: ``matmul``, ``lookup`` (rows of a table), ``sum`` or ``mean``.
    """

    op: str
    factor: Factor
    kind: str


@dataclass(frozen=True)
class Literal:
    """A number among an op's arguments that must be a rank's share where ``extent`` is cut.

    Attributes:
        op: the op's name.
        argument: the name of the argument.
        extent: what the number counts: the groups of a convolution, what lies before a slice's end.
        along: the dim that it is an offset in, as negative and open ends count from there; None for a plain count.
        item: its place, where the argument is a constant vector.
    """

    op: str
    argument: str
    extent: Factor
    along: Factor | None = None
    item: int = 0


class Walk:
    """The state of one forward walk over a graph; ``numbers`` are constant vectors of integers, by value."""

    def __init__(self, numbers: Mapping[str, tuple[int, ...]]) -> None:
        self.values: dict[str, Dims | Sequence[Dims | None] | None] = {}
        self.metas: dict[str, Meta | None] = {}
        self.contractions: list[Contraction] = []
        self.literals: list[Literal] = []
        self.numbers = numbers
        self.unknown: list[tuple[str, str]] = []
        self.weights: set[str] = set()
        self.op: Op | None = None

    def dims(self, value: object) -> Dims:
        """Return the dims of a single tensor; an empty list for anything else."""
        found = self.values.get(value.name) if isinstance(value, Ref) else None
        if not found or not isinstance(found[0], Factor):
            return []
        return [f for f in found if isinstance(f, Factor)]

    def meta(self, value: object) -> Meta | None:
        """Return the shape and dtype of a value."""
        return self.metas.get(value.name) if isinstance(value, Ref) else None

    def reason(self, why: str) -> Block:
        """Return a block that names the op at hand."""
        op = self.op
        return Block(why, op.name if op else "", op.where if op else "")

    def block(self, factor: Factor, why: str) -> None:
        """Forbid cutting ``factor``, for the op at hand."""
        block(factor, self.reason(why))

    def unify(self, a: Factor, b: Factor) -> None:
        """Say that two extents are the same one."""
        target = self.op.target.split(".")[-1] if self.op else "op"
        unify(a, b, self.reason(f"{target} joins extents that do not match"))

    def fresh(self, meta: Meta | None) -> Dims:
        """Return new leaves for a shape."""
        return [Factor(size) for size in meta.shape] if meta else []

    def blocked(self, dims: Sequence[Factor], why: str) -> Dims:
        """Return ``dims``, none of which may be cut."""
        for dim in dims:
            self.block(dim, why)
        return list(dims)

    def around(self, dims: Sequence[Factor], shape: Sequence[int], why: str) -> Dims:
        """Return the dims of a result whose elements each read many along ``dims``: kept or new, all blocked."""
        self.blocked(dims, why)
        return self.blocked([d if d.size == n else Factor(n) for d, n in zip(dims, shape, strict=True)], why)

    def contract(self, factor: Factor, kind: str) -> None:
        """Record that the op at hand sums over ``factor``."""
        if factor.size > 1 and self.op is not None:
            self.contractions.append(Contraction(self.op.name, factor, kind))

    def literal(self, argument: str, extent: Factor, along: Factor | None = None, item: int = 0) -> None:
        """Record that an argument of the op at hand counts ``extent``, so that the code's number must follow a cut."""
        if self.op is not None and extent.size > 1:
            self.literals.append(Literal(self.op.name, argument, extent, along, item))

    def broadcast(self, shape: Sequence[int], operands: Sequence[Dims]) -> Dims:
        """Unify right-aligned dims; a dim of 1 that is broadcast is not unified."""
        out: list[Factor | None] = [None] * len(shape)
        for dims in operands:
            for i in range(1, len(dims) + 1):
                dim = dims[-i]
                known = out[-i]
                if dim.size != shape[-i]:
                    continue
                if known is None:
                    out[-i] = dim
                else:
                    self.unify(known, dim)
        return [dim if dim is not None else Factor(shape[i]) for i, dim in enumerate(out)]


def shape_of(op: Op) -> tuple[int, ...]:
    """Return the shape (elements) of an op's single result."""
    return op.result.shape if isinstance(op.result, Meta) else ()


def dim_of(op: Op, name: str, rank: int, default: int = 0) -> int:
    """Return a dim argument counted from the front."""
    value = op.arguments.get(name)
    value = default if value is None else value
    return int(value) % max(rank, 1)


def dims_of(op: Op, name: str, rank: int) -> list[int]:
    """Return a dim-list argument counted from the front; every dim where it is left out."""
    value = op.arguments.get(name)
    if value is None or value == ():
        return list(range(rank))
    return [int(v) % max(rank, 1) for v in ([value] if isinstance(value, int) else value)]
