"""From what a user asks for to the options of the pipeline: defaults filled in, what cannot be refused."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

import torch.distributed as dist

from autoshard.cluster import Cluster
from autoshard.dtypes import SUMMED
from autoshard.errors import InvalidArgument
from autoshard.passes.choose_mesh import CHECKPOINTING
from autoshard.passes.weights import MOMENTS
from autoshard.pipeline import Options

DEFAULT_DEVICE = "H100-80"


def make_options(
    world: int | None = None,
    *,
    batch: int | None = None,
    sequence: int | None = None,
    device: str | Cluster | None = None,
    memory: float | None = None,
    devices_per_node: int | None = None,
    interconnect: str | None = None,
    optimizer: str | None = None,
    mixed_precision: str | None = None,
    masters: str | None = None,
    tp_reduce_dtype: str | None = None,
    checkpointing: str | None = None,
    logits: str | None = None,
    overrides: Mapping[str, str] | None = None,
    **same: Any,
) -> Options:
    """Return the options that the arguments of ``autoshard.plan`` mean; ``same`` are taken as they are.

    Raises:
        InvalidArgument: an argument is not one of what is allowed, or the world is not known.
    """
    return Options(
        world=_world(world),
        batch=batch or 1,
        sequence=sequence or 2048,
        cluster=_cluster(device, devices_per_node, interconnect, memory),
        optimizer=_one_of("optimizer", optimizer, MOMENTS) or "adamw",
        mixed_precision=_one_of("mixed_precision", mixed_precision, ("bfloat16",)),
        masters=_one_of("masters", masters, ("float32",)),
        tp_reduce_dtype=_one_of("tp_reduce_dtype", tp_reduce_dtype, SUMMED),
        checkpointing=_one_of("checkpointing", checkpointing, CHECKPOINTING),
        logits=_one_of("logits", logits, ("whole", "sharded")) or "whole",
        overrides=overrides or {},
        **same,
    )


def _cluster(
    device: str | Cluster | None, devices_per_node: int | None, interconnect: str | None, memory: float | None
) -> Cluster:
    """Return the cluster that the options describe."""
    if isinstance(device, Cluster):
        if (devices_per_node, interconnect, memory) != (None, None, None):
            raise InvalidArgument(
                "a cluster says all about its devices",
                got="device=Cluster(...) with devices_per_node, interconnect or memory",
                help="change it with dataclasses.replace, or give the name of a device",
            )
        return device
    return Cluster.of(device or DEFAULT_DEVICE, devices_per_node, interconnect, memory)


def _one_of(name: str, value: Any, allowed: Iterable[str]) -> Any:
    if value is not None and value not in allowed:
        raise InvalidArgument(f"no {name} is called {value!r}", got=f"{value!r}; allowed: {', '.join(allowed)}")
    return value


def _world(world: int | None) -> int:
    if world is not None:
        return world
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    if "WORLD_SIZE" in os.environ:
        return int(os.environ["WORLD_SIZE"])
    raise InvalidArgument("the number of ranks is not known", help="pass world=, or run under torchrun")
