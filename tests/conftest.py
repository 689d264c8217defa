"""Fixtures for all tests."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import pytest
import torch
from spawn import Pool, close_all, pool

# tests run side by side, one to a core: threads of one would only wait for those of the other
torch.set_num_threads(1)


def pytest_collection_finish() -> None:
    """Let the collector pass by what was imported: it is most of what there is, and stays."""
    gc.freeze()


@pytest.fixture(scope="session")
def gloo() -> Iterator[Callable[[int], Pool]]:
    """``gloo(n)`` is the pool of ``n`` persistent worker processes."""
    yield pool
    close_all()
