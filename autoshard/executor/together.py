"""Work that one rank does for all: its result, or its refusal, reaches every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from autoshard.errors import AutoshardError, RanksDisagree
from autoshard.executor.agree import has_peers

T = TypeVar("T")


def together(work: Callable[[], T]) -> T:
    """Run ``work`` on rank 0 and return its result on every rank; what it raises is raised on every rank.

    Raises:
        RanksDisagree: on the other ranks, where rank 0 met an error that is none of autoshard's.
    """
    if not has_peers():
        return work()
    answer: list[Any] = [None, None]
    failure: Exception | None = None
    if dist.get_rank() == 0:
        try:
            answer[0] = work()
        except AutoshardError as error:
            answer[1] = error
        except Exception as error:  # noqa: BLE001 - any error must reach the ranks that wait; it is raised below
            failure = error
            answer[1] = RanksDisagree("rank 0 failed", got=f"{type(error).__name__}: {error}")
    dist.broadcast_object_list(answer, src=0)
    if failure is not None:
        raise failure
    if answer[1] is not None:
        raise answer[1]
    result: T = answer[0]
    return result
