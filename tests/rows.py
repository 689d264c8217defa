"""Rows of one table that always run, and rows that only `make long` runs: more of what the first ones show."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def few(rows: Iterable[Any], kept: Collection[Any] | int) -> list[Any]:
    """Return rows for ``parametrize``, those that are not kept marked ``long``.

    Args:
        rows: values, or tuples of them.
        kept: the rows that always run, or how many of the first ones.
    """
    found = []
    for number, row in enumerate(rows):
        always = number < kept if isinstance(kept, int) else row in kept
        values = row if isinstance(row, tuple) and type(row) is tuple else (row,)
        found.append(row if always else pytest.param(*values, marks=pytest.mark.long))
    return found
