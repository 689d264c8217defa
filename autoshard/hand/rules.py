"""Which rule of a hand plan concerns which module or parameter.

A pattern is a dotted name, in which ``*`` stands for one step that is a number. A rule without ``*`` beats one with.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TypeVar

T = TypeVar("T")


class Rules(dict[str, T]):
    """Rules by pattern, and which of them were used.

    Attributes:
        used: the patterns that named something so far.
    """

    def __init__(self, rules: Mapping[str, T]) -> None:
        super().__init__(rules)
        self.used: set[str] = set()
        self._literal = {pattern for pattern in rules if "*" not in pattern.split(".")}
        self._compiled = [(p, re.compile(_regex(p))) for p in rules if p not in self._literal]

    def of(self, names: Iterable[str]) -> str | None:
        """Return the pattern that names one of ``names``, or None."""
        for name in names:
            found = self._find(name)
            if found is not None:
                self.used.add(found)
                return found
        return None

    def _find(self, name: str) -> str | None:
        if name in self._literal:
            return name
        return next((pattern for pattern, regex in self._compiled if regex.fullmatch(name)), None)

    @property
    def idle(self) -> list[str]:
        """Return the patterns that named nothing."""
        return [pattern for pattern in self if pattern not in self.used]


def _regex(pattern: str) -> str:
    return r"\.".join(r"\d+" if step == "*" else re.escape(step) for step in pattern.split("."))
