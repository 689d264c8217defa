"""Run one function on many jobs, each in a child process of its own, with a time-out.

Children are forked from this process, which has imported what they need and started no threads: a child costs
milliseconds, and one that dies, leaks or hangs concerns its own job only.
"""

from __future__ import annotations

import importlib
import multiprocessing
import pkgutil
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import autoshard


@dataclass(frozen=True)
class Answer:
    """What became of one job.

    Attributes:
        job: what the function was called with.
        fate: ``answered``, ``time-out`` or ``died``; a function that raises has died, its traceback is on stderr.
        value: what the function returned; None unless it answered.
        seconds: how long it took.
    """

    job: str
    fate: str
    value: Any
    seconds: float


@dataclass(frozen=True)
class _Child:
    job: str
    process: multiprocessing.process.BaseProcess
    start: float


def answers(
    jobs: Iterable[str], work: Callable[[str], Any], *, workers: int = 1, timeout: float = 180
) -> Iterator[Answer]:
    """Yield what became of each job, as they end; at most ``workers`` run at once, each for ``timeout`` seconds."""
    context = multiprocessing.get_context("fork")
    waiting = deque(jobs)
    running: dict[Connection, _Child] = {}
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                job = waiting.popleft()
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(target=_serve, args=(work, job, theirs))
                process.start()
                theirs.close()  # or the end of a dead child is not seen
                running[ours] = _Child(job, process, time.perf_counter())
            oldest = min(child.start for child in running.values())
            ready = wait(list(running), max(0.0, oldest + timeout - time.perf_counter()))
            for ours, child in list(running.items()):
                seconds = time.perf_counter() - child.start
                if ours in ready or seconds > timeout:
                    fate, value = _receive(ours) if ours in ready else ("time-out", None)
                    _end(running, ours)
                    yield Answer(child.job, fate, value, round(seconds, 1))
    finally:
        for ours in list(running):
            _end(running, ours)


def _serve(work: Callable[[str], Any], job: str, answer: Connection) -> None:
    answer.send(work(job))


def _receive(ours: Connection) -> tuple[str, Any]:
    try:
        return "answered", ours.recv()
    except EOFError:
        return "died", None


def _end(running: dict[Connection, _Child], ours: Connection) -> None:
    child = running.pop(ours)
    child.process.kill()
    child.process.join()
    ours.close()


def load_all() -> None:
    """Import all of the package, here and not in each child: the code may change while a sweep runs."""
    for module in pkgutil.walk_packages(autoshard.__path__, "autoshard."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
