"""Numbers in the user's code that count, or point into, what is cut: what a rank must have in their place.

The shape of a result shows most sizes that do not follow a cut. It does not show the number of groups of a norm, where
a slice begins, or a size that a value is divided by.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from autoshard.ir import Op, Ref, Traced
from autoshard.passes.factors import Factor, Ways, local_size
from autoshard.passes.rules.walk import Literal

#: Arguments that are sizes of the result, whose shape is compared; and a row number that the executor makes local.
_SIZES = frozenset(["size", "shape", "sizes", "split_sizes", "split_size", "output_size", "repeats", "padding_idx"])
#: Ops whose result is the same numbers again.
_COPIES = frozenset(["aten.lift_fresh_copy", "aten.detach_", "aten.detach", "aten.alias", "aten.clone"])


def numbers_of(traced: Traced) -> dict[str, tuple[int, ...]]:
    """Return the short vectors of integers that the code holds as constants, and copies of those, by value."""
    found = {source.name: source.numbers for source in traced.sources if source.numbers is not None}
    for op in traced.ops:
        source = op.arguments.get("self")
        if op.target in _COPIES and isinstance(source, Ref) and source.name in found:
            found[op.name] = found[source.name]
    return found


def wrong_number(
    literals: list[Literal],
    want: Op,
    have: Op,
    numbers: Mapping[str, tuple[int, ...]],
    cut: frozenset[Factor],
    degree: Ways,
) -> str | None:
    """Return what is wrong with a number among the arguments that an op has on a rank's share, or None.

    Args:
        literals: those of ``want``, the op as it was traced whole.
        want: the op on whole values.
        have: the op on a rank's share.
        numbers: what ``numbers_of`` finds in the rank's graph.
        cut: the leaves that are cut.
        degree: tp ranks.
    """
    for literal in literals:
        got = _given(literal, have, numbers, cut, degree)
        needed = local_size(literal.extent, cut, degree)
        if got is not None and got != needed:
            return f"a literal number in the code does not follow the cut: {literal.argument}={got}, needed {needed}"
    skipped = {literal.argument for literal in literals} | _SIZES
    if want.target in ("aten.slice", "aten.narrow"):
        skipped |= {"start", "end", "length"}  # an end at or behind the last element, if there is no literal
    for name, value in want.arguments.items():
        if name not in skipped and list(_plain(value)) != list(_plain(have.arguments.get(name))):
            return f"a number in the code follows the cut: {have.arguments.get(name)} instead of {value}"
    return None


def _given(
    literal: Literal, have: Op, numbers: Mapping[str, tuple[int, ...]], cut: frozenset[Factor], degree: Ways
) -> int | None:
    """Return the number that the rank's code has, offsets counted from the front; None where it has none."""
    if literal.argument not in have.arguments:
        return None
    value = have.arguments[literal.argument]
    if literal.argument == "indices":
        vector = next((numbers.get(ref.name, ()) for ref in value if isinstance(ref, Ref)), ())
        value = vector[literal.item] if literal.item < len(vector) else -1
    if literal.along is None:
        return None if value is None else int(value)
    size = local_size(literal.along, cut, degree)
    if value is None:
        return 0 if literal.argument == "start" else size
    return min(int(value) + (size if value < 0 else 0), size)


def _plain(value: Any) -> Iterator[Any]:
    """Yield the numbers in an argument."""
    if isinstance(value, (int, float)):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _plain(item)
