"""Fixtures for all tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from spawn import Pool, close_all, pool


@pytest.fixture(scope="session")
def gloo() -> Iterator[Callable[[int], Pool]]:
    """``gloo(n)`` is the pool of ``n`` persistent worker processes."""
    yield pool
    close_all()
