"""The moment of the most memory in backward of one unit, by playing backward of its ops in reverse.

Autograd holds a gradient for each value from its last reader's backward to its maker's, adds up in place, and frees
what an op kept once its backward has run. Gradients of parameters stay until the unit's are reduced.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from sympy.polys.rings import PolyElement

from autoshard.passes.extents import ZERO


@dataclass(frozen=True)
class Step:
    """Backward of one op. Sizes are bytes.

    Attributes:
        result: the value whose gradient it consumes.
        makes: the gradients it makes, by operand.
        weights: the gradients of parameters it makes.
        frees: what the op kept, freed behind it.
        aside: what it needs for itself while it runs.
        shared: whether the gradient of its operand is a view of that of its result.
    """

    result: str
    makes: Mapping[str, PolyElement]
    weights: PolyElement
    frees: PolyElement
    aside: PolyElement
    shared: bool


def worst_moment(steps: Sequence[Step], size: Callable[[PolyElement], float]) -> PolyElement:
    """Return the bytes beside what is kept at the worst moment, which may be less than nothing kept.

    Args:
        steps: in the order of forward.
        size: the number of bytes of a polynomial.
    """
    live: dict[str, PolyElement] = {}
    held = worst = ZERO
    most = 0.0
    for step in reversed(steps):
        gone = live.pop(step.result, ZERO)
        fresh = ZERO
        moved = step.shared and list(step.makes.values()) == [gone]
        doubled = ZERO
        for value, made in step.makes.items():
            fresh += ZERO if moved else made
            if value in live:
                doubled += made  # added up in place, and dropped
            live[value] = made
        moment = held + step.weights + fresh + step.aside
        if size(moment) > most:
            worst, most = moment, size(moment)
        held += step.weights + fresh - doubled - (ZERO if moved else gone) - step.frees
    return worst
