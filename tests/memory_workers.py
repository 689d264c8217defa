"""What the ranks run to count the bytes of a model, its optimizer and the call that shards them."""

from __future__ import annotations

import contextlib
import functools
import gc
import warnings
import weakref
from collections.abc import Iterable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from live_bytes import LiveBytes
from models import Decoder, token_loss
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

import autoshard
from autoshard.reading import read_plan

#: options of a plan, and the optimizer it is for
OPTIMIZERS: dict[str, tuple[dict[str, Any], Any]] = {
    "adamw": ({}, functools.partial(torch.optim.AdamW, lr=0.01, foreach=True)),
    "sgd-momentum": (
        {"optimizer": "sgd-momentum"},
        functools.partial(torch.optim.SGD, lr=0.01, momentum=0.9, foreach=True),
    ),
    "sgd": ({"optimizer": "sgd"}, functools.partial(torch.optim.SGD, lr=0.01, foreach=True)),
    "masters": ({"masters": "float32"}, functools.partial(torch.optim.AdamW, lr=0.01, foreach=True)),
}
LAYERS, VOCAB, BATCH, LENGTH = 8, 256, 4, 8
WAYS = {
    "made after sharding, by a factory": "after",
    "made before, not given": "forgotten",
    "made before, given": "before",
    "made before, one step taken, given": "populated",
}


def build(trained: str = "adamw") -> nn.Module:
    """A decoder of many equal blocks: one block is a small part of it."""
    torch.manual_seed(0)
    model = Decoder(vocab=VOCAB, layers=LAYERS, kv_heads=4)
    return model.bfloat16() if trained == "masters" else model


def ids(seed: int, rows: slice = slice(None)) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB, (BATCH, LENGTH), generator=generator)[rows]


def local_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages on this rank, each once."""
    locals_ = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in locals_}.values())


def states(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [v for values in optimizer.state.values() for v in values.values() if isinstance(v, Tensor) and v.dim()]


def measure(
    data: dict[str, Any], when: str, start: str, compare: bool = True, trained: str = "adamw"
) -> dict[str, Any]:
    """Shard a model and take one step; return bytes on this rank.

    Args:
        data: the plan.
        when: a value of ``WAYS``.
        start: ``"cpu"`` or ``"meta"``: where the model is when it is sharded.
        compare: whether the ranks compare their values first; its sums take up to 24 MiB for a while.
        trained: a key of ``OPTIMIZERS``.
    """
    plan = read_plan(data)
    with torch.device(start):
        model = build(trained)
    make_optimizer = OPTIMIZERS[trained][1]
    optimizer: torch.optim.Optimizer | None
    optimizer = None if when == "after" else make_optimizer(model.parameters())
    if when == "populated":
        assert optimizer is not None
        token_loss(model(ids(0)), ids(0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    full = sum(p.nbytes for p in model.parameters())
    old = [weakref.ref(parameter) for parameter in model.parameters()]
    held = [*model.parameters(), *model.buffers(), *(states(optimizer) if optimizer else [])]
    gc.collect()
    live = LiveBytes(held)
    before = live.now
    del held
    make: Any = make_optimizer if when == "after" else optimizer
    skip = contextlib.nullcontext() if compare else mock.patch("autoshard.executor.execute.equalise")
    with live, skip, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        autoshard.parallelize(model, plan, optimizer=None if when == "forgotten" else make)
        in_call = live.peak
        if start == "meta":
            model.to_empty(device="cpu")
    if optimizer is None:
        (optimizer,) = autoshard.optimizers(model)
    gc.collect()
    after = live.now
    if start == "meta":
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(std=0.1)
    share, index = BATCH // plan.mesh.data, dist.get_rank() // plan.mesh.tp
    rows = slice(index * share, (index + 1) * share)
    start_values = [parameter.detach().clone() for parameter in model.parameters()]
    token_loss(model(ids(1, rows)), ids(1, rows)).backward()
    optimizer.step()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    parameters = list(model.parameters())
    return {
        "full": full,
        "said": [str(warning.message) for warning in said],
        "before the call": before,
        "peak in the call": in_call,
        "peak": live.peak,
        "after the call": after,
        "parameters": local_bytes(parameters),
        "stale": sum(p.nbytes for ref in old if (p := ref()) is not None and not p.is_meta),
        "gradients": local_bytes(p.grad for p in parameters if p.grad is not None),
        "optimizer": local_bytes(states(optimizer)),
        "trains": any(not torch.equal(_local(a), _local(b)) for a, b in zip(parameters, start_values, strict=True)),
    }


def _local(tensor: Tensor) -> Tensor:
    detached = tensor.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached
