"""Agreement over ranks: one plan, one verdict, one set of values.

Everything that can be checked is checked on each rank before anything changes; ``Unanimous`` makes a refusal on
one rank a refusal on all, so that nobody waits for a rank that is gone. On the fake process group, where one
process stands for many, there is nobody to ask.
"""

from __future__ import annotations

import hashlib
import warnings
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autoshard.errors import RanksDisagree
from autoshard.plans import Plan

CHUNK = 1 << 20


def has_peers() -> bool:
    """Whether there are other ranks that answer."""
    return dist.is_initialized() and dist.get_world_size() > 1 and dist.get_backend() != "fake"


def gather(value: Any) -> list[Any]:
    """Return every rank's ``value``, by rank; any picklable object."""
    if not has_peers():
        return [value]
    answers: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(answers, value)
    return answers


class Unanimous:
    """A block that raises on every rank if it raises on one, or if the ranks hold different plans or options.

    Raises:
        RanksDisagree: on the ranks that had nothing to refuse themselves.
    """

    def __init__(self, plan: Plan, options: str = "") -> None:
        self.options = options
        self.digest = hashlib.sha256(plan.to_json().encode()).hexdigest()

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not isinstance(error, Exception):
            return  # an interrupt: the others are interrupted too
        answers = gather((self.digest, self.options, None if error is None else f"{type(error).__name__}: {error}"))
        if error is not None:
            return
        for rank, (_, _, text) in enumerate(answers):
            if text is not None:
                raise RanksDisagree(f"rank {rank} refused", got=text, help=f"see the output of rank {rank}")
        different = [rank for rank, (digest, _, _) in enumerate(answers) if digest != answers[0][0]]
        if different:
            raise RanksDisagree(
                f"{len(different)} of {len(answers)} ranks have another plan than rank 0",
                got=f"ranks {different}",
                help="make the plan on one rank, save it, and load it on all",
            )
        others = [rank for rank, (_, options, _) in enumerate(answers) if options != answers[0][1]]
        if others:
            raise RanksDisagree(
                f"{len(others)} of {len(answers)} ranks have other options than rank 0",
                at=f"ranks {others}",
                got=f"{answers[others[0]][1]}; on rank 0: {answers[0][1]}",
                help="pass the same options on every rank",
            )


def equalise(model: nn.Module, device_type: str) -> int:
    """Give every rank rank 0's parameters and buffers where they differ, and return how many did.

    Compares checksums first: equal models exchange 16 bytes per tensor. Meta tensors have no values and are skipped.

    Args:
        model: plain tensors of the same shapes on every rank.
        device_type: where the process group communicates.

    Raises:
        RanksDisagree: a tensor has values on some ranks only.
    """
    if not has_peers():
        return 0
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    answers = gather({name: None if t.is_meta else checksum(t.detach()) for name, t in tensors.items()})
    different = [name for name in answers[0] if any(answer.get(name) != answers[0][name] for answer in answers)]
    missing = [name for name in different if any(answer.get(name) is None for answer in answers)]
    if missing:
        raise RanksDisagree(
            f"{len(missing)} tensors have values on some ranks only",
            at=missing[0],
            got="on the meta device, or absent",
            help="build the model the same way on every rank",
        )
    for name in different:
        _broadcast(tensors[name].detach(), device_type)
    if different:
        warnings.warn(
            f"{len(different)} of {len(tensors)} tensors differed between ranks, and now hold rank 0's values: "
            f"{', '.join(different[:3])}{', ...' if len(different) > 3 else ''}",
            stacklevel=4,
        )
    return len(different)


def checksum(tensor: Tensor) -> tuple[int, int]:
    """Return two 64-bit sums over the bits of ``tensor``, the second weighted by position: exact in any order."""
    plain = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[plain.element_size()]
    bits = plain.contiguous().view(-1).view(width)
    total, weighted = (torch.zeros((), dtype=torch.int64, device=tensor.device) for _ in range(2))
    for start in range(0, bits.numel(), CHUNK):
        part = bits[start : start + CHUNK].to(torch.int64)
        total += part.sum()
        weighted += (part * torch.arange(start + 1, start + 1 + part.numel(), device=tensor.device)).sum()
    return int(total), int(weighted)


def _broadcast(tensor: Tensor, device_type: str) -> None:
    there = tensor.to(device_type).contiguous()
    dist.broadcast(there, src=0)
    if there is not tensor:
        tensor.copy_(there)
