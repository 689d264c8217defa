"""All tensor-parallel ranks in one process: torch's local-tensor simulation over a fake process group.

Works with no process group and beside a live one, which is put aside and put back. Checked on torch 2.13.0.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import debug as dtensor_debug
from torch.testing._internal.distributed.fake_pg import FakeStore

from autoshard.proving.written import OnePerRank

#: Groups get their names from a counter; ones that start here collide with no live group's.
_FIRST_GROUP = 1_000_000
_TABLES = ("_pg_map", "_pg_names", "_pg_group_ranks", "_pg_backend_config", "_tags_to_pg", "_pg_to_tag")


@contextlib.contextmanager
def simulated(world: int) -> Iterator[None]:
    """Be all of ``world`` ranks inside the block: tensors hold one value per rank, collectives work on those.

    The process's random state, its groups and its excepthook are afterwards as they were.

    Raises:
        RuntimeError: torch's own, where the code inside branches on a value that differs between ranks.
    """
    with (
        torch.random.fork_rng(devices=[]),
        _live_group_aside(),
        _fake_group(world),
        LocalTensorMode(world),
        OnePerRank(),
    ):
        yield


@contextlib.contextmanager
def _fake_group(world: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        yield
    finally:
        # not destroy_process_group: that would forget a live group too
        module: Any = c10d
        for name in module._pg_names.values():
            torch._C._distributed_c10d._unregister_process_group(name)
        module.GroupMember.WORLD = None
        # its caches hand out specs with any equal mesh: none may survive whose group is gone
        dtensor_debug._clear_sharding_prop_cache()


@contextlib.contextmanager
def _live_group_aside() -> Iterator[None]:
    module: Any = c10d
    world, count, backend = module._world.default_pg, module._world.group_count, module._backend
    tables = {name: dict(getattr(module, name)) for name in _TABLES}
    coalescing = dict(module._world.pg_coalesce_state)
    excepthook = sys.excepthook  # making a group puts the rank in front of every traceback
    try:
        for name in _TABLES:
            getattr(module, name).clear()
        module._world.pg_coalesce_state.clear()
        module._world.default_pg = None
        module._world.group_count = _FIRST_GROUP
        yield
    finally:
        for name, table in tables.items():
            getattr(module, name).clear()
            getattr(module, name).update(table)
        module._world.pg_coalesce_state.update(coalescing)
        module._world.group_count = count
        module._backend = backend
        sys.excepthook = excepthook
        # the setter also tells the C++ side which group is the default one
        module.GroupMember.WORLD = world


def on_each_rank(tensor: Tensor, world: int) -> list[Tensor]:
    """Return a tensor's value on every rank, detached; a DTensor gives its local parts."""
    value: Any = tensor.detach()
    if isinstance(value, AsyncCollectiveTensor):
        value = value.wait()
    if isinstance(value, DTensor):
        value = value._local_tensor
        if isinstance(value, AsyncCollectiveTensor):
            value = value.wait()
    if isinstance(value, LocalTensor):
        return [value._local_tensors[rank].detach() for rank in range(world)]
    return [value] * world
