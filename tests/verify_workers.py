"""Jobs of gloo ranks around a live process group, and work that goes wrong on a rank."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from models import Decoder
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from verify_models import Mlp

import autoshard
from autoshard.errors import InvalidArgument


def verify_beside_a_live_group() -> dict[str, Any]:
    """Verify for four ranks whatever the live world is, then use the live group, its DTensors and its FSDP."""
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    whole = torch.arange(8.0).view(4, 2)
    cut = distribute_tensor(whole, mesh, [Shard(0)])
    torch.manual_seed(0)
    model = Decoder(layers=1)
    hook, state = sys.excepthook, torch.get_rng_state()
    proofs = [autoshard.verify(model, autoshard.plan(model, world=2, tp=2)).ok for _ in range(2)]
    same_state = torch.equal(torch.get_rng_state(), state)
    total = torch.ones(1)
    dist.all_reduce(total)
    product: Any = cut @ distribute_tensor(whole.T.contiguous(), mesh, [Replicate()])
    later = init_device_mesh("cpu", (world,))
    sharded = autoshard.parallelize(Mlp(), autoshard.plan(Mlp(), world=world))
    sharded(torch.ones(2, 3, 16)).sum().backward()
    return {
        "proofs": proofs,
        "same group": dist.get_world_size() == world and dist.get_backend() == "gloo",
        "same hook": sys.excepthook is hook,
        "same random state": same_state,
        "sum": float(total),
        "gathered": torch.equal(cut.redistribute(mesh, [Replicate()]).to_local(), whole),
        "matmul": torch.equal(product.full_tensor(), whole @ whole.T),
        "new": torch.equal(distribute_tensor(whole, later, [Shard(1)]).full_tensor(), whole),
        "gradients": all(g is not None for g in autoshard.full_gradients(sharded).values()),
    }


def answer(payload: bytes) -> tuple[int, bytes]:
    """What a rank that works returns."""
    total = torch.ones(1)
    dist.all_reduce(total)
    return int(total), payload


def fail_on_one(payload: bytes) -> None:
    """Rank 1 raises, the other one waits for it."""
    if dist.get_rank() == 1:
        raise ValueError("rank 1 is out of luck")
    dist.barrier()


def refuse_on_one(payload: bytes) -> None:
    if dist.get_rank() == 1:
        raise InvalidArgument("rank 1 refuses", help="ask another one")
    dist.barrier()


def die_on_one(payload: bytes) -> None:
    if dist.get_rank() == 1:
        os._exit(7)
    dist.barrier()


def hang(payload: bytes) -> None:
    time.sleep(1000)
