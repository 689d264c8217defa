"""Measure this machine: what local processes compute, copy and send to each other, as a cluster of that many devices.

Every process is a rank of a gloo group with its share of the cores, and all of them measure at the same time, as they
would train. A figure is the median of some repetitions on the slowest rank. With N ranks a ring all-reduce of B bytes
sends ``2 (N-1)/N B`` from each rank in ``2 (N-1)`` hops, an all-gather of B bytes half of both; the slower of the two
gives the bandwidth, and 8 bytes give the latency of a hop. Between nodes nothing is measured: the same is assumed.
"""

from __future__ import annotations

import os
import pickle
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from autoshard.cluster import Cluster
from autoshard.devices import Device
from autoshard.errors import InvalidArgument, ProcessFailed
from autoshard.proving.ranks import Crashed, run_on_ranks

LIMIT_SECONDS = 600.0
_DTYPES = ("float64", "float32", "bfloat16", "float16")
_FEW_BYTES = 8


@dataclass(frozen=True)
class Sizes:
    """What is measured with.

    Attributes:
        matmul: rows and columns of the square matrices that are multiplied.
        copied_bytes: of the tensor that is copied: more than the caches hold.
        payload_bytes: of an all-reduce, and of the result of an all-gather.
        repetitions: of everything, after one that does not count.
    """

    matmul: int = 1024
    copied_bytes: int = 2**28
    payload_bytes: int = 2**25
    repetitions: int = 5


def probe(processes: int = 2, sizes: Sizes = Sizes(), limit_seconds: float = LIMIT_SECONDS) -> Cluster:
    """Measure this machine as one node of ``processes`` devices.

    Args:
        processes: local ranks, each with its share of the cores and of the memory; 2 or more.
        sizes: what is measured with.
        limit_seconds: for everything.

    Raises:
        InvalidArgument: fewer than 2 processes.
        ProcessFailed: a process died, or did not answer in time.
    """
    if processes < 2:
        raise InvalidArgument(
            f"{processes} processes have no link between them", got=f"{processes}; allowed: 2 or more"
        )
    answer = run_on_ranks(processes, _on_rank, pickle.dumps(sizes), limit_seconds)
    if isinstance(answer, Crashed):
        raise ProcessFailed(f"rank {answer.rank} failed while it measured", got=answer.traceback.strip())
    slowest = {what: max(rank[what] for rank in answer) for what in answer[0]}
    return cluster_of(slowest, processes, sizes)


def cluster_of(seconds: dict[str, float], processes: int, sizes: Sizes) -> Cluster:
    """Return what measured times mean.

    Args:
        seconds: of a matmul by dtype, of ``"copy"``, and of ``"all_reduce"`` and ``"all_gather"`` of the payload and of
            a few bytes (``"all_reduce few"``).
        processes: how many ranks took part.
        sizes: what was measured with.
    """
    hops = {"all_reduce": 2 * (processes - 1), "all_gather": processes - 1}
    sent = {op: count / processes * sizes.payload_bytes for op, count in hops.items()}
    bandwidth = min(sent[op] / seconds[op] for op in hops)
    latency = max(seconds[f"{op} few"] / hops[op] for op in hops)
    threads = _threads(processes)
    device = Device(
        name=f"CPU, {threads} {'thread' if threads == 1 else 'threads'} a process",
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // processes,
        flops={dtype: 2 * sizes.matmul**3 / seconds[dtype] for dtype in _DTYPES if dtype in seconds},
        memory_bandwidth=2 * sizes.copied_bytes / seconds["copy"],  # read and written
        link="gloo",
        link_bandwidth=bandwidth,
        network_bandwidth=bandwidth,
        devices_per_node=processes,
        sources={},
    )
    measured = dict.fromkeys(Device.__dataclass_fields__.keys() - {"name", "sources"}, "autoshard probe")
    return Cluster(
        replace(device, sources=measured),
        processes,
        bandwidth,
        bandwidth,
        latency,
        latency,
        overlaps=False,
        sustained=True,
    )


def _threads(processes: int) -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // processes)


def _on_rank(payload: bytes) -> dict[str, float]:
    """Measure everything on this rank, each repetition begun together with the others; median seconds."""
    sizes: Sizes = pickle.loads(payload)
    torch.set_num_threads(_threads(dist.get_world_size()))
    jobs: dict[str, Callable[[], Any]] = {}
    for dtype in _DTYPES:
        a, b = (torch.ones(sizes.matmul, sizes.matmul, dtype=getattr(torch, dtype)) for _ in range(2))
        jobs[dtype] = partial(torch.matmul, a, b)
    source, target = (torch.ones(max(1, sizes.copied_bytes // 4)) for _ in range(2))
    jobs["copy"] = partial(target.copy_, source)
    for name, size in (("", sizes.payload_bytes), (" few", _FEW_BYTES)):
        world = dist.get_world_size()
        whole = torch.ones(-(-size // (4 * world)) * world)
        part = whole[: len(whole) // world].clone()
        jobs[f"all_reduce{name}"] = partial(dist.all_reduce, whole)
        jobs[f"all_gather{name}"] = partial(dist.all_gather_single, whole, part)
    return {what: _median(job, sizes.repetitions) for what, job in jobs.items()}


def _median(job: Callable[[], Any], repetitions: int) -> float:
    seconds = []
    for _ in range(repetitions + 1):
        dist.barrier()
        start = time.perf_counter()
        job()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


__all__ = ["Sizes", "cluster_of", "probe"]
