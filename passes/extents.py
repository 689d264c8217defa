"""Extents of tensors as polynomials in the workload and the tensor-parallel degree.

An extent is a polynomial with integer coefficients in ``B`` (sequences per data rank), ``T`` (tokens per sequence) and
``u = 1/t`` (t the tp degree): ``4*B*T*u`` elements for a value of 4 features a token that are cut over tp. The ring is
sympy's, so that an extent prints, multiplies and evaluates with numbers and with symbols.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sympy.polys.domains import ZZ
from sympy.polys.rings import PolyElement, ring

from autoshard.passes.factors import Factor, find, ways_of
from autoshard.passes.states import Placed, State

RING, B, T, U = ring("B,T,u", ZZ)
ONE: PolyElement = RING.one
ZERO: PolyElement = RING.zero


def at(size: PolyElement, batch: Any, sequence: Any, tp: Any) -> Any:
    """Return a polynomial's value for numbers, or its expression for symbols."""
    total: Any = 0
    for (b, t, u), coefficient in size.terms():
        total += int(coefficient) * batch**b * sequence**t / tp**u
    return total


@dataclass(frozen=True)
class Extents:
    """Extents of the values of a placed model.

    Attributes:
        placed: the placed cuts.
        named: the batch and sequence factors.
        begun: values that are cut along the sequence behind the op that makes them: it works on the whole sequence.
    """

    placed: Placed
    named: Mapping[Factor, PolyElement]
    begun: frozenset[str] = frozenset()
    _known: dict[tuple[Factor, bool], PolyElement] = field(default_factory=dict, compare=False, repr=False)
    _products: dict[tuple[PolyElement, ...], PolyElement] = field(default_factory=dict, compare=False, repr=False)

    @staticmethod
    def of(placed: Placed) -> Extents:
        """Find the batch and sequence factors by the inputs they come from."""
        symbols = {"batch": B, "sequence": T}
        named: dict[Factor, PolyElement] = {}
        factored = placed.chosen.factored
        for name, dims in factored.traced.workload_dims.items():
            for label, factor in zip(dims, factored.single(name), strict=False):
                if label in symbols:
                    named[find(factor)] = symbols[label]
        begun = frozenset(c.value for c in placed.sequence.conversions if "->S(" in c.kind)
        return Extents(placed, named, begun)

    def extent(self, factor: Factor, cut: bool) -> PolyElement:
        """Return the elements one tp rank holds of a dim; all of them unless ``cut``."""
        factor = find(factor)
        key = (factor, cut)
        if key not in self._known:
            self._known[key] = self._extent(factor, cut)
        return self._known[key]

    def _extent(self, factor: Factor, cut: bool) -> PolyElement:
        if factor in self.named:
            return self.named[factor]
        if factor.kind != "leaf":
            inner = [self.extent(child, cut) for child in factor.children]
            return multiplied(inner) if factor.kind == "product" else sum(inner, ZERO)
        chosen = self.placed.chosen
        ways = ways_of(factor, chosen.inner, chosen.ways) if cut else 1
        if ways == 1:
            return RING(factor.size)
        return factor.size * U if ways == chosen.degree else RING(factor.size // ways)

    def dims(self, value: str, result: int = 0, whole: bool = False, made: bool = False) -> tuple[PolyElement, ...]:
        """Return the extents that one tp rank holds of a tensor in training; all of them if ``whole``.

        Args:
            value: the value.
            result: which of its tensors, for an op with several.
            whole: whether to leave out that it is cut.
            made: whether as its op makes it, before a conversion cuts it along the sequence.
        """
        tensors = self.placed.chosen.factored.tensors(value)
        if result >= len(tensors):
            return ()
        cut = not whole and self.placed.states.get(value) is State.S
        found = [self.extent(dim, cut) for dim in tensors[result]]
        along = self.placed.sequence.dims.get(value)
        if along is not None and not whole and not (made and value in self.begun):
            found[along] = found[along] * U
        if value in self.placed.logits and not whole:
            found[-1] = found[-1] * U
        return tuple(found)

    def numel(self, value: str, result: int = 0, whole: bool = False, made: bool = False) -> PolyElement:
        """Return the elements of ``dims``."""
        dims = self.dims(value, result, whole, made)
        if dims not in self._products:
            self._products[dims] = multiplied(dims)
        return self._products[dims]


def multiplied(sizes: Iterable[PolyElement]) -> PolyElement:
    """Return the product of extents."""
    total = ONE
    for size in sizes:
        total = total * size
    return total
