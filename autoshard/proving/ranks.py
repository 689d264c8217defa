"""Local processes that are the ranks of a gloo group for one piece of work, with a time limit."""

from __future__ import annotations

import logging
import multiprocessing
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from autoshard.errors import AutoshardError, ProcessFailed, RanksDisagree

#: How long the other ranks may go on after one has failed.
_GRACE_SECONDS = 3.0
_POLL_SECONDS = 0.05

Work = Callable[[bytes], Any]


@dataclass(frozen=True)
class Crashed:
    """What a rank's work raised, where it was no refusal.

    Attributes:
        rank: its number.
        traceback: as printed.
        time: when, in seconds since the epoch: the others only lose their connection, later.
    """

    rank: int
    traceback: str
    time: float


def run_on_ranks(world: int, work: Work, payload: bytes, limit_seconds: float) -> list[Any] | Crashed:
    """Run ``work(payload)`` on ``world`` new processes and return the answers by rank.

    Args:
        world: number of processes; each has one thread and is a rank of a gloo group.
        work: a function of an importable module; what it returns is pickled.
        payload: the same on every rank.
        limit_seconds: from the start of the processes to the last answer.

    Returns:
        The answers, or what the first rank that failed raised.

    Raises:
        AutoshardError: a rank's own refusal.
        ProcessFailed: a process died, or did not answer in time.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "payload").write_bytes(payload)
        # a daemon dies with this process
        processes = [
            context.Process(target=_be_rank, args=(rank, world, name, work), daemon=True) for rank in range(world)
        ]
        try:
            for process in processes:
                process.start()
            _wait(processes, folder, time.monotonic() + limit_seconds)
            return _collect(processes, folder, limit_seconds)
        finally:
            for process in processes:
                if process.pid is not None:
                    process.kill()
                    process.join()


def _be_rank(rank: int, world: int, name: str, work: Work) -> None:
    folder = Path(name)
    torch.set_num_threads(1)
    # the order in which a small tensor is gathered is no news
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=world, timeout=timedelta(hours=1)
        )
        answer = work((folder / "payload").read_bytes())
    except AutoshardError as error:
        answer = error
    except Exception:  # noqa: BLE001 - whatever the user's code raises on a rank is the finding
        answer = Crashed(rank, traceback.format_exc(), time.time())
    failed = isinstance(answer, (AutoshardError, Crashed))
    with (folder / f"writing {rank}").open("wb") as file:
        pickle.dump(answer, file)
    (folder / f"writing {rank}").rename(folder / f"{'failed' if failed else 'done'} {rank}")


def _wait(processes: Sequence[BaseProcess], folder: Path, deadline: float) -> None:
    """Wait for every answer; once a rank has failed or died, only a little."""
    while time.monotonic() < deadline:
        done = {int(path.name.split()[1]) for path in folder.glob("done *")}
        failed = any(folder.glob("failed *"))
        died = any(p.exitcode is not None and rank not in done for rank, p in enumerate(processes))
        if len(done) == len(processes):
            return
        if failed or died:
            deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
        if all(process.exitcode is not None for process in processes):
            return
        time.sleep(_POLL_SECONDS)


def _collect(processes: Sequence[BaseProcess], folder: Path, limit_seconds: float) -> list[Any] | Crashed:
    answers = {int(path.name.split()[1]): pickle.loads(path.read_bytes()) for path in folder.glob("[df]* *")}
    refusals = [answers[rank] for rank in sorted(answers) if isinstance(answers[rank], AutoshardError)]
    # a rank that had nothing to refuse itself only repeats another one's words
    for error in sorted(refusals, key=lambda e: isinstance(e, RanksDisagree)):
        raise error
    silent = [rank for rank in range(len(processes)) if rank not in answers]
    crashes = [answer for answer in answers.values() if isinstance(answer, Crashed)]
    died = [rank for rank in silent if processes[rank].exitcode is not None]
    if crashes and not died:
        return min(crashes, key=lambda crash: crash.time)
    if silent:
        code = processes[died[0]].exitcode if died else None
        who = died or silent
        how = f"died with exit code {code}" if died else "did not answer"
        raise ProcessFailed(
            f"{len(who)} of {len(processes)} processes {how}",
            got=f"ranks {', '.join(map(str, who))}, within {limit_seconds:.0f} s",
            help="see their output above; run with fewer processes, or with more memory and time",
        )
    return [answers[rank] for rank in range(len(processes))]
