"""Persistent gloo workers for tests: started once per session and size, each job an importable function.

A job gets its arguments on every rank and returns anything that pickles; ``run`` returns the answers by rank. A job
makes and destroys nothing but its own meshes. When a rank fails its traceback is raised here; ranks that do not
answer within the time limit are killed, and the next job gets new ones.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

LIMIT_SECONDS = 120.0
GRACE_SECONDS = 5.0


class WorkerError(AssertionError):
    """A job failed on some rank; the message holds its traceback."""


def _work(rank: int, world: int, meeting: str, pipe: Connection) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
    gc.freeze()
    while True:
        try:
            job = pipe.recv_bytes()
        except EOFError:
            break
        pipe.send_bytes(pickle.dumps(_answer(job)))
        _tidy()


def _tidy() -> None:
    """Destroy the groups of the job's meshes: each keeps threads that poll, and hundreds of them slow every rank."""
    import torch.distributed as dist
    import torch.distributed.distributed_c10d as c10d
    from torch.distributed.tensor import _collective_utils, _redistribute, debug

    if "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].reset()  # compiled code holds the job's models
    # these hold meshes, and with them groups; they also hand out specs with any equal mesh, whose group may be gone
    debug._clear_sharding_prop_cache()
    _redistribute.clear_redistribute_planner_cache()
    _redistribute._gen_transform_infos.cache_clear()
    _collective_utils.MeshTopoInfo.build_from_mesh.cache_clear()
    gc.collect()
    for group in [g for g in c10d._world.pg_map if g is not dist.group.WORLD]:
        dist.destroy_process_group(group)
    gc.freeze()  # what is left are modules that the job imported: the collector need not go through them each time


def _answer(job: bytes) -> tuple[bool, Any]:
    try:
        function, args, kwargs = pickle.loads(job)
        return True, function(*args, **kwargs)
    except Exception:  # noqa: BLE001  whatever the job raises is shown by the test
        return False, traceback.format_exc()


class Pool:
    """``world`` processes that stay alive between jobs."""

    def __init__(self, world: int) -> None:
        self.world = world
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def run(self, function: Callable[..., Any], *args: Any, limit: float = LIMIT_SECONDS, **kwargs: Any) -> list[Any]:
        """Run ``function`` on every rank and return the answers by rank.

        Raises:
            WorkerError: it failed on a rank, or did not end in ``limit`` seconds.
        """
        if not self._processes:
            self._start()
        job = pickle.dumps((function, args, kwargs))
        for pipe in self._pipes:
            pipe.send_bytes(job)
        return self._collect(time.monotonic() + limit)

    def close(self) -> None:
        """End the processes."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.kill()
            process.join()
        self._processes, self._pipes = [], []

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        meeting = Path(tempfile.mkdtemp()) / "meeting"
        for rank in range(self.world):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(rank, self.world, str(meeting), theirs), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def _collect(self, deadline: float) -> list[Any]:
        answers: dict[int, Any] = {}
        errors: dict[int, str] = {}
        open_pipes = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        while open_pipes:
            ready = wait(list(open_pipes), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                silent = sorted(open_pipes.values())
                self.close()
                raise WorkerError("\n".join([f"ranks {silent} did not answer", *_labelled(errors)]))
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = open_pipes.pop(pipe)
                try:
                    done, answer = pickle.loads(pipe.recv_bytes())
                except EOFError:
                    done, answer = False, "the process died"
                (answers if done else errors)[rank] = answer
                if not done:
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        if errors:
            if "the process died" in errors.values():
                self.close()
            raise WorkerError("\n".join(_labelled(errors)))
        return [answers[rank] for rank in range(self.world)]


def _labelled(errors: dict[int, str]) -> list[str]:
    return [f"rank {rank}: {text}" for rank, text in sorted(errors.items())]


_pools: dict[int, Pool] = {}


def pool(world: int) -> Pool:
    """Return the pool of ``world`` ranks, one per session."""
    if world not in _pools:
        _pools[world] = Pool(world)
    return _pools[world]


def close_all() -> None:
    """End every pool."""
    for each in _pools.values():
        each.close()
    _pools.clear()
