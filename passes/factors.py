"""Factors: the atomic extents that tensor dims are made of.

A factor is a *leaf* (one extent), a *product* (a flattened dim, major to minor) or a *concatenation* (parts laid end to
end). Factors are union-find nodes: ``unify`` says that two are the same, and refining a leaf into a product or a
concatenation refines every dim that shares it. A block on a leaf says why it can't be cut.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["leaf", "product", "concatenation"]
#: Over how many ranks leaves are cut: one number for all, or a number by leaf.
Ways = int | Mapping["Factor", int]


@dataclass(frozen=True)
class Block:
    """Why a factor cannot be cut: the reason, the op that says so, and the user's ``file:line``."""

    why: str
    op: str = ""
    where: str = ""


class Factor:
    """One extent. Compare factors with ``is``, after ``find``."""

    __slots__ = ("blocks", "children", "into", "kind", "serial", "size")
    _serials = itertools.count()

    def __init__(self, size: int, kind: Kind = "leaf", children: Sequence[Factor] = ()) -> None:
        self.size = size
        self.kind: Kind = kind
        self.children: list[Factor] = list(children)
        self.into: Factor | None = None
        self.blocks: dict[Block, None] = {}
        self.serial = next(Factor._serials)

    def __repr__(self) -> str:
        return show(self)


def find(factor: Factor) -> Factor:
    """Return the factor that ``factor`` was unified into."""
    if factor.into is None:
        return factor
    root = factor
    while root.into is not None:
        root = root.into
    while factor.into is not None:
        factor.into, factor = root, factor.into
    return root


def product(factors: Iterable[Factor]) -> Factor:
    """Return the product of ``factors``, major to minor; extents of 1 drop out."""
    kept = [f for f in factors if f.size != 1]
    if not kept:
        return Factor(1)
    return kept[0] if len(kept) == 1 else Factor(math.prod(f.size for f in kept), "product", kept)


def concatenation(factors: Iterable[Factor]) -> Factor:
    """Return the parts laid end to end; empty parts drop out."""
    kept = [f for f in factors if f.size]
    if not kept:
        return Factor(0)
    return kept[0] if len(kept) == 1 else Factor(sum(f.size for f in kept), "concatenation", kept)


def flat(factor: Factor) -> list[Factor]:
    """Return the factors of a product, nested products opened, major to minor; a non-product is its own only factor."""
    factor = find(factor)
    if factor.kind == "product":
        return [f for child in factor.children for f in flat(child)]
    return [factor]


def parts(factor: Factor) -> list[Factor]:
    """Return the parts of a concatenation, nested ones opened; anything else is its own only part."""
    factor = find(factor)
    if factor.kind == "concatenation":
        return [f for child in factor.children for f in parts(child)]
    return [factor]


def leaves(factor: Factor) -> Iterator[Factor]:
    """Yield every leaf below ``factor``, with repeats, in order."""
    factor = find(factor)
    if factor.kind == "leaf":
        yield factor
    else:
        for child in factor.children:
            yield from leaves(child)


def count(factor: Factor, cut: frozenset[Factor]) -> int:
    """Return how often a dim is cut by the leaves in ``cut``: summed over a product, the most over a concatenation."""
    factor = find(factor)
    if factor.kind == "leaf":
        return int(factor in cut)
    counts = [count(child, cut) for child in factor.children]
    return sum(counts) if factor.kind == "product" else max(counts, default=0)


def ways_of(leaf: Factor, cut: frozenset[Factor], degree: Ways) -> int:
    """Return over how many ranks a leaf is cut: 1 where it is not."""
    if leaf not in cut:
        return 1
    return degree if isinstance(degree, int) else degree[leaf]


def whole_cut(factor: Factor, cut: frozenset[Factor]) -> bool:
    """Whether every part of the dim is cut."""
    return least_ways(factor, cut, 2) > 1


def least_ways(factor: Factor, cut: frozenset[Factor], degree: Ways) -> int:
    """Return over how many ranks the part that is cut least is cut: a sum over fewer than all counts parts twice."""
    return _ways(factor, cut, degree, min)


def most_ways(factor: Factor, cut: frozenset[Factor], degree: Ways) -> int:
    """Return over how many ranks the part that is cut most is cut."""
    return _ways(factor, cut, degree, max)


def _ways(factor: Factor, cut: frozenset[Factor], degree: Ways, pick: Callable[[list[int]], int]) -> int:
    factor = find(factor)
    if factor.kind == "leaf":
        return ways_of(factor, cut, degree)
    found = [_ways(child, cut, degree, pick) for child in factor.children]
    return math.prod(found) if factor.kind == "product" else pick(found)


def local_size(factor: Factor, cut: frozenset[Factor], degree: Ways) -> int:
    """Return the extent one rank holds when the leaves in ``cut`` are cut over ``degree`` ranks."""
    factor = find(factor)
    if factor.kind == "leaf":
        return factor.size // ways_of(factor, cut, degree)
    sizes = [local_size(child, cut, degree) for child in factor.children]
    return math.prod(sizes) if factor.kind == "product" else sum(sizes)


def narrowed(factor: Factor, sizes: Mapping[Factor, int]) -> int:
    """Return an extent when the leaves in ``sizes`` have those sizes instead of their own."""
    factor = find(factor)
    if factor.kind == "leaf":
        return sizes.get(factor, factor.size)
    inner = [narrowed(child, sizes) for child in factor.children]
    return math.prod(inner) if factor.kind == "product" else sum(inner)


def cut_parts(factor: Factor, cut: frozenset[Factor], degree: Ways) -> list[tuple[int, int, int]] | None:
    """Return the dim as pieces ``(offset, length, ways)``, each cut evenly over ``ways`` ranks; 0 for a whole piece.

    A product cut below its major factor repeats: one piece for each index of the factors above. None where the cut
    pieces are not contiguous runs.
    """
    factor = find(factor)
    if count(factor, cut) == 0:
        return [(0, factor.size, 0)]
    if factor.kind == "leaf":
        return [(0, factor.size, ways_of(factor, cut, degree))]
    pieces: list[tuple[int, int, int]] = []
    if factor.kind == "concatenation":
        offset = 0
        for child in factor.children:
            inner = cut_parts(child, cut, degree)
            if inner is None:
                return None
            pieces += [(offset + o, n, c) for o, n, c in inner]
            offset += find(child).size
        return pieces
    factors = flat(factor)
    major = next(i for i, f in enumerate(factors) if count(f, cut))
    inner = cut_parts(factors[major], cut, degree)
    end = major + 1
    # a factor that is cut down to one index hands its ranks on to the next one
    while inner and inner[0][1] == inner[0][2] and end < len(factors) and find(factors[end]) in cut:
        inner = [(0, inner[0][1] * factors[end].size, inner[0][2] * ways_of(find(factors[end]), cut, degree))]
        end += 1
    if inner is None or any(count(f, cut) for f in factors[end:]):
        return None
    above = math.prod(f.size for f in factors[:major])
    below = math.prod(f.size for f in factors[end:])
    stride = math.prod(f.size for f in factors[major:])
    for index in range(above):
        pieces += [(index * stride + o * below, n * below, c) for o, n, c in inner]
    return pieces


def block(factor: Factor, reason: Block) -> None:
    """Forbid cutting any leaf of ``factor``."""
    if factor.size > 1:
        for leaf in leaves(factor):
            leaf.blocks.setdefault(reason)


def show(factor: Factor, cut: frozenset[Factor] = frozenset()) -> str:
    """Write a factor as ``(4*x2x16)``: products with x, concatenations with +, cut leaves starred."""
    factor = find(factor)
    if factor.kind == "leaf":
        return f"{factor.size}{'*' if factor in cut else ''}"
    sign = "x" if factor.kind == "product" else "+"
    return "(" + sign.join(show(child, cut) for child in factor.children) + ")"
