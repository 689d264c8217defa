"""Where the elements of a dim lie that is cut in parts: each part is cut evenly over tp, and a rank holds its slices.

Rank r of a fused projection holds ``[q_r; k_r; v_r]`` as one contiguous tensor. Joined rank by rank this is another
order than the parameter's own: **by rank** here, against **canonical**. FSDP then cuts what a rank holds in a row, as
it cuts anything.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from autoshard._torch import DTensorSpec, shard_dim_of
from autoshard.plans import Parts


@dataclass(frozen=True)
class Piece:
    """A stretch of the cut dim that a rank holds in canonical order.

    Attributes:
        local: where it begins in what the rank holds.
        canonical: where it begins in the whole dim.
        length: how long it is.
    """

    local: int
    canonical: int
    length: int


@dataclass(frozen=True)
class Order:
    """How a dim is cut in parts.

    Attributes:
        dim: the dim.
        parts: ``(offset, length)``; they make up the dim.
        ways: number of tp ranks; divides each length.
    """

    dim: int
    parts: Parts
    ways: int

    def by_rank(self, canonical: Tensor) -> Tensor:
        """Return a whole tensor with the cut dim in the order by rank."""
        dim = self.dim
        pieces = [canonical.narrow(dim, *part).unflatten(dim, (self.ways, -1)) for part in self.parts]
        return torch.cat(pieces, dim + 1).flatten(dim, dim + 1)

    def canonical(self, by_rank: Tensor) -> Tensor:
        """Return a whole tensor with the cut dim in its own order; the inverse of ``by_rank``."""
        dim = self.dim
        lengths = [length // self.ways for _, length in self.parts]
        pieces = by_rank.unflatten(dim, (self.ways, -1)).split(lengths, dim + 1)
        return torch.cat([piece.flatten(dim, dim + 1) for piece in pieces], dim)

    def pieces(self, spec: DTensorSpec) -> list[Piece]:
        """Return what this rank holds of the cut dim, in order; nothing where it holds nothing."""
        rank = _coordinate(spec)[-1]
        start, length = held(spec)[self.dim]
        start -= rank * (spec.shape[self.dim] // self.ways)
        return list(self._between(rank, start, start + length))

    def _between(self, rank: int, start: int, end: int) -> Iterator[Piece]:
        """Yield the pieces of elements ``start`` to ``end`` of what a tp rank holds."""
        before = 0
        for offset, length in self.parts:
            share = length // self.ways
            low, high = max(start, before), min(end, before + share)
            if low < high:
                yield Piece(low - start, offset + rank * share + low - before, high - low)
            before += share


def held(spec: DTensorSpec) -> list[tuple[int, int]]:
    """Return the start and length of what this rank holds, by dim: tp cuts first, and is the last axis of the mesh."""
    found = [(0, size) for size in spec.shape]
    axes = range(len(spec.placements))
    coordinate = _coordinate(spec)
    for axis in (axes[-1], *axes[:-1]):
        dim = shard_dim_of(spec.placements[axis])
        if dim is not None:
            start, length = found[dim]
            share = -(-length // spec.mesh.size(axis))
            first = min(coordinate[axis] * share, length)
            found[dim] = (start + first, min(share, length - first))
    return found


def _coordinate(spec: DTensorSpec) -> list[int]:
    coordinate = spec.mesh.get_coordinate()
    assert coordinate is not None, "every rank is on the mesh"
    return list(coordinate)
