"""Find the module attributes that make the sizes in the user's code local.

Reads the placed cuts whose code has literal sizes. Decides which integer attributes to divide by the tp degree, per
module: the fewest with which every size is what the analysis needs, and every comparison and number stays what it was.
Leaves alone what no attribute can satisfy.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from autoshard.passes.factors import local_size
from autoshard.passes.place import Placed
from autoshard.passes.trace import Trace
from autoshard.provenance import Expression, Tracker, attributes, evaluate

Attribute = tuple[str, str]
_MOST_TRIED = 10


@dataclass(frozen=True)
class Resize:
    """Solve for attributes.

    Attributes:
        given: the example inputs the model was traced with, or None.
    """

    given: Any = None

    def run(self, model: nn.Module, placed: Placed) -> dict[Attribute, int]:
        """Return new values by ``(module, attribute)``; empty where nothing is to be set or nothing helps."""
        tracker = Tracker()
        Trace(self.given, tracker=tracker).run(model)
        problem = _Problem(placed, tracker)
        found: dict[Attribute, int] = {}
        for hot in problem.components():
            found.update(problem.solve(hot))
        return {**found, **_siblings(found, placed)}


class _Problem:
    """Constraints on attributes: sizes that must be local, and results that must stay."""

    def __init__(self, placed: Placed, tracker: Tracker) -> None:
        self.placed = placed
        self.names = tracker.names
        self.sizes: list[tuple[Expression, int]] = []
        for use in tracker.noted.sizes:
            needed = self._local(use.mark, use.dim, None)
            if needed is not None and any(attributes(use.expression)):
                self.sizes.append((use.expression, needed))
        self.fixed = [(e, result) for e, result in tracker.noted.fixed if any(attributes(e))]
        self.values = {(part[1], part[2]): part[3] for e, _ in (*self.sizes, *self.fixed) for part in _parts(e)}

    def _local(self, mark: int, dim: int, size: int | None) -> int | None:
        chosen = self.placed.chosen
        dims = chosen.factored.single(self.names.get(mark, ""))
        if dim >= len(dims):
            return size
        return local_size(dims[dim], chosen.inner, chosen.degree)

    def _now(self, expression: Expression, values: Mapping[Attribute, int]) -> Any:
        try:
            return evaluate(expression, values, lambda mark, dim, size: self._local(mark, dim, size) or size)
        except ZeroDivisionError:
            return None

    def components(self) -> list[tuple[Attribute, ...]]:
        """Return the attributes in unsatisfied sizes, those that occur together in one group."""
        groups: dict[Attribute, set[Attribute]] = {}
        for expression, needed in self.sizes:
            together = set(attributes(expression))
            if self._now(expression, {}) != needed:
                merged = together.union(*(groups.get(a, set()) for a in together))
                for attribute in merged:
                    groups[attribute] = merged
        unique = {id(group): tuple(sorted(group)) for group in groups.values()}
        return sorted(set(unique.values()))

    def solve(self, hot: tuple[Attribute, ...]) -> dict[Attribute, int]:
        """Return the fewest divided attributes with which everything they take part in holds."""
        degree = self.placed.chosen.degree
        every = [(e, n, set(attributes(e))) for e, n in (*self.sizes, *self.fixed)]
        # where a quotient of two must stay, both change: what occurs together with a hot attribute may help
        beside = {a for _, _, found in every if found & set(hot) for a in found} - set(hot)
        able = [a for a in (*hot, *sorted(beside)) if self.values[a] % degree == 0][:_MOST_TRIED]
        wanted = [(e, n) for e, n, found in every if found & set(able)]
        for number in range(1, len(able) + 1):
            for picked in itertools.combinations(able, number):
                values = {a: self.values[a] // degree for a in picked}
                if all(self._now(e, values) == result for e, result in wanted):
                    return values
        return {}


def _parts(expression: Expression) -> list[Expression]:
    if expression[0] == "attribute":
        return [expression]
    return [part for inner in expression[2:] for part in _parts(inner)] if expression[0] == "op" else []


def _siblings(found: Mapping[Attribute, int], placed: Placed) -> dict[Attribute, int]:
    """Return the same settings for the blocks that were written out as copies of traced ones."""
    copies: dict[str, list[str]] = defaultdict(list)
    for copy, pattern in placed.chosen.factored.traced.copies.items():
        copies[pattern].append(copy)
    more: dict[Attribute, int] = {}
    for (module, name), value in found.items():
        for pattern, others in copies.items():
            if module == pattern or module.startswith(pattern + "."):
                more.update({(other + module.removeprefix(pattern), name): value for other in others})
    return more
