"""Numbers and names as a person reads them: bytes, shares, counts, and many names folded into few patterns."""

from __future__ import annotations

from collections.abc import Iterable

from autoshard.patterns import fold, unfold

_KIB = 1024
_Row = tuple[str, ...]


def human_bytes(count: int) -> str:
    """Write a number of bytes with a binary unit: ``human_bytes(3 << 20)`` is ``3.0 MiB``."""
    if abs(count) < _KIB:
        return f"{count} B"
    value = float(count)
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        value /= _KIB
        # 1023.97 would print as 1024.0: the next unit says it better
        if abs(value) < _KIB - 0.05 or unit == "TiB":
            break
    return f"{value:,.1f} {unit}"


def percent(share: float) -> str:
    """Write a share in [0, 1] with one decimal; what is not all is never shown as ``100%``, nor a little as ``0%``."""
    if share in (0, 1):
        return f"{share:.0%}"
    if share < 0.0005:
        return "<0.1%"
    return ">99.9%" if share >= 0.9995 else f"{share:.1%}"


def counted(number: int, noun: str) -> str:
    """Write a number with its noun: ``1 rank``, ``8 ranks``."""
    return f"{number} {noun}" if number == 1 else f"{number:,} {noun}s"


def fold_names(names: Iterable[str]) -> list[str]:
    """Fold dotted names that differ in one number into patterns, in the order in which they came.

    Names that differ in several numbers (layers and experts) are folded over each: such a pattern is for reading,
    ``unfold`` does not take it.

    Args:
        names: names or patterns of a plan, such as ``layers.0.up``, ``layers.1.up``.

    Returns:
        Patterns such as ``layers.{0-1}.up``.
    """
    rows: list[_Row] = [tuple(name.split(".")) for pattern in names for name in unfold(pattern)]
    for position in range(max(map(len, rows), default=0)):
        rows = _fold_position(rows, position)
    return [".".join(row) for row in rows]


def _fold_position(rows: list[_Row], position: int) -> list[_Row]:
    """Merge the rows that are equal but for a number at ``position``."""
    numbers: dict[tuple[_Row, _Row], set[int]] = {}
    for row in rows:
        if _is_number(row, position):
            numbers.setdefault((row[:position], row[position + 1 :]), set()).add(int(row[position]))
    merged: dict[_Row, None] = {}
    for row in rows:
        if _is_number(row, position):
            before, after = row[:position], row[position + 1 :]
            row = (*before, fold(sorted(numbers[before, after])), *after)
        merged[row] = None
    return list(merged)


def _is_number(row: _Row, position: int) -> bool:
    return position < len(row) and row[position].isdigit()
