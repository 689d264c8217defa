"""Many ranks in one process: torch's local-tensor simulation over the fake process group, and that group alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode


@contextmanager
def fake_world(world: int) -> Iterator[None]:
    """This process is rank 0 of ``world``; collectives return at once and move nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def simulated(world: int) -> Iterator[LocalTensorMode]:
    """This process is all of ``world`` ranks, with true values."""
    with fake_world(world), LocalTensorMode(world) as mode:
        yield mode


def per_rank(*values: Tensor) -> Tensor:
    """A tensor whose value on rank i is ``values[i]``."""
    return LocalTensor(dict(enumerate(values)))


def on_rank(tensor: Tensor, rank: int) -> Tensor:
    """The value on one rank."""
    value = tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor
    return value._local_tensors[rank] if isinstance(value, LocalTensor) else value


def same_on_all(tensor: Tensor | None) -> Tensor:
    """The value that all ranks agree on."""
    assert tensor is not None
    value = tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor
    return value.reconcile() if isinstance(value, LocalTensor) else value


class CountCollectives(TorchDispatchMode):
    """Counts collectives as ``(op, elements)``."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[tuple[str, int]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        if function.namespace == "c10d":
            tensors = args[0] if isinstance(args[0], list) else [args[0]]
            self.seen.append((function._schema.name.removeprefix("c10d::"), sum(t.numel() for t in tensors)))
        return function(*args, **(kwargs or {}))

    def count(self, op: str) -> int:
        return sum(name == op for name, _ in self.seen)


def seeded(*shape: int, seed: int = 0) -> Tensor:
    """Normal float64 values that depend on nothing else."""
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
