"""Names with numbers folded into patterns: ``layers.{0-2,5}.up``."""

from __future__ import annotations

import re

_BRACES = re.compile(r"\{([0-9,\-]+)\}")


def unfold(pattern: str) -> list[str]:
    """Expand ``layers.{0-2,5}.up`` to its names, in order. A name without braces is itself.

    A pattern has one group of numbers; it stands for each number in turn.
    """
    found = _BRACES.search(pattern)
    if not found:
        return [pattern]
    numbers: list[int] = []
    for span in found.group(1).split(","):
        low, _, high = span.partition("-")
        numbers += range(int(low), int(high or low) + 1)
    return [pattern[: found.start()] + str(number) + pattern[found.end() :] for number in numbers]


def fold(numbers: list[int]) -> str:
    """Write sorted numbers as ``{0-2,5}``; a single number is written plain."""
    if len(numbers) == 1:
        return str(numbers[0])
    spans: list[str] = []
    start = previous = numbers[0]
    for number in [*numbers[1:], None]:
        if number is not None and number == previous + 1:
            previous = number
            continue
        spans.append(str(start) if start == previous else f"{start}-{previous}")
        if number is not None:
            start = previous = number
    return "{" + ",".join(spans) + "}"
