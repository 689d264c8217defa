"""Sizes in the user's code as constraints on integer attributes, and their best solution."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from autoshard.passes.factors import Factor, local_size
from autoshard.passes.states import Placed
from autoshard.provenance import Expression, SizeUse, Tracker, attributes, evaluate

Attribute = tuple[str, str]
Wanted = tuple[Expression, Any]
#: The most values that are tried together for attributes that occur together.
_MOST_TRIED = 20_000


@dataclass(frozen=True)
class Size:
    """One size that the code gives: what it must be on a rank.

    Attributes:
        use: the size.
        value: the name of the value it shapes.
        needed: what it must be.
        extent: what it counts; None where the op is told a number that no cut touches.
    """

    use: SizeUse
    value: str
    needed: int
    extent: Factor | None


class Sizes:
    """The constraints of one trace: sizes that must be local, and results that must stay."""

    def __init__(self, placed: Placed, tracker: Tracker) -> None:
        self.placed = placed
        self.names = tracker.names
        self.counts = {(one.op, one.argument): one.extent for one in placed.chosen.factored.literals}
        self.sizes = [size for use in tracker.noted.sizes for size in self._needed(use)]
        fixed = [(e, result) for e, result in tracker.noted.fixed if any(attributes(e))]
        self.fixed = list(dict.fromkeys(fixed))
        self.values: dict[Attribute, int] = {
            (leaf[1], leaf[2]): leaf[3]
            for e in (*(size.use.expression for size in self.sizes), *(e for e, _ in self.fixed))
            for leaf in _leaves(e)
            if leaf[0] == "attribute"
        }

    def _needed(self, use: SizeUse) -> Iterator[Size]:
        chosen = self.placed.chosen
        name = self.names.get(use.mark, "")
        if isinstance(use.dim, str):
            extent = self.counts.get((name, use.dim))
        else:
            dims = chosen.factored.single(name)
            if use.dim >= len(dims):
                return
            extent = dims[use.dim]
        cut = chosen.leaves_in(name)
        yield Size(use, name, use.value if extent is None else local_size(extent, cut, chosen.degree), extent)

    def now(self, expression: Expression, values: Mapping[Attribute, int]) -> Any:
        """Return what an expression is on a rank where attributes have other values; None where it is not defined."""
        try:
            return evaluate(expression, values, self._local)
        except ZeroDivisionError:
            return None

    def extents(self, expression: Expression) -> list[Factor]:
        """Return what the sizes that an expression reads off values count."""
        found = []
        for leaf in _leaves(expression):
            dims = self.placed.chosen.factored.single(self.names.get(leaf[1], "")) if leaf[0] == "size" else []
            found += dims[leaf[2] : leaf[2] + 1] if dims else []
        return found

    def _local(self, mark: int, dim: int, size: int) -> int:
        chosen = self.placed.chosen
        dims = chosen.factored.single(self.names.get(mark, ""))
        return local_size(dims[dim], chosen.inner, chosen.degree) if dim < len(dims) else size

    def wrong(self, values: Mapping[Attribute, int]) -> list[Size]:
        """Return the sizes that are not what a rank needs."""
        return [size for size in self.sizes if self.now(size.use.expression, values) != size.needed]

    def solve(self) -> dict[Attribute, int]:
        """Return the fewest attributes with which the most sizes are right and every side condition holds."""
        found: dict[Attribute, int] = {}
        for group in self._groups():
            found.update(self._solved(group))
        return found

    def _groups(self) -> list[tuple[Attribute, ...]]:
        """Return the attributes in wrong sizes, those that occur together in one group."""
        groups: dict[Attribute, set[Attribute]] = {}
        for size in self.wrong({}):
            together = set(attributes(size.use.expression))
            merged = together.union(*(groups.get(a, set()) for a in together))
            for attribute in merged:
                groups[attribute] = merged
        unique = {id(group): tuple(sorted(group)) for group in groups.values()}
        return sorted(set(unique.values()))

    def _solved(self, hot: tuple[Attribute, ...]) -> dict[Attribute, int]:
        able = dict(self._able(hot))
        # how often each is used does not matter, only whether it can be written otherwise
        must = self._among(able, ((s.use.expression, s.needed) for s in self.sizes if s.use.written is None))
        may = self._among(able, ((s.use.expression, s.needed) for s in self.sizes if s.use.written is not None))
        keep = self._among(able, self.fixed)
        best: tuple[int, ...] | None = None
        picked: dict[Attribute, int] = {}
        for values in _assignments(able):
            if any(self.now(e, values) != result for e, result in keep):
                continue
            cost = tuple(sum(self.now(e, values) != n for e, n in some) for some in (must, may))
            if best is None or cost < best:
                best, picked = cost, values
            if best == (0, 0):
                break
        return picked

    def _able(self, hot: tuple[Attribute, ...]) -> Iterator[tuple[Attribute, tuple[int, ...]]]:
        """Yield the values to try for hot attributes, and for those beside: where a quotient must stay, both change."""
        every = [set(attributes(e)) for e in (*(s.use.expression for s in self.sizes), *(e for e, _ in self.fixed))]
        beside = {a for found in every if found & set(hot) for a in found} - set(hot)
        tried = 1
        for attribute in (*hot, *sorted(beside)):
            candidates = self._candidates(attribute)
            if candidates and tried * (len(candidates) + 1) <= _MOST_TRIED:
                tried *= len(candidates) + 1
                yield attribute, candidates

    @staticmethod
    def _among(able: Mapping[Attribute, Any], wanted: Iterable[Wanted]) -> list[Wanted]:
        """Return what depends on an attribute that may change, each once."""
        return list(dict.fromkeys(one for one in wanted if any(a in able for a in attributes(one[0]))))

    def _candidates(self, attribute: Attribute) -> tuple[int, ...]:
        """Return the values to try: a rank's share, and what is needed where the attribute alone is a size."""
        value, degree = self.values[attribute], self.placed.chosen.degree
        alone = ("attribute", *attribute, value)
        found = [value // degree] if value and value % degree == 0 else []
        found += [size.needed for size in self.sizes if size.use.expression == alone]
        return tuple(dict.fromkeys(n for n in found if n != value))


def _assignments(able: Mapping[Attribute, tuple[int, ...]]) -> Iterator[dict[Attribute, int]]:
    """Yield every way to change attributes, the fewest changes first."""
    for number in range(len(able) + 1):
        for picked in itertools.combinations(able.items(), number):
            for values in itertools.product(*(candidates for _, candidates in picked)):
                yield dict(zip((a for a, _ in picked), values, strict=True))


def _leaves(expression: Expression) -> Iterator[Expression]:
    if expression[0] == "op":
        for inner in expression[2:]:
            yield from _leaves(inner)
    else:
        yield expression
