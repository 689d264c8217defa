"""What a forward and its backward did, value by value, on one process and on every simulated rank.

A model is observed at its module boundaries: what each call returned, and the gradient that came back to it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from autoshard.outputs import tensors

Ranks = list[Tensor]
Key = tuple[str, int, str]


@dataclass
class Observed:
    """Values and gradients by ``(module, number of the call, output path)``, in execution order.

    Attributes:
        values: what each call returned.
        gradients: what came back to it.
        entered: the modules whose forward is running, outermost first.
    """

    values: dict[Key, Ranks] = field(default_factory=dict)
    gradients: dict[Key, Ranks] = field(default_factory=dict)
    entered: list[str] = field(default_factory=list)

    @property
    def running(self) -> str:
        """The innermost module whose forward is running, or was when it raised; ``""`` for none."""
        return self.entered[-1] if self.entered else ""


@contextmanager
def observe(model: nn.Module, read: Callable[[Tensor], Ranks]) -> Iterator[Observed]:
    """Watch every module call of ``model`` in the block; ``read`` gives a tensor's value on each rank."""
    seen = Observed()
    calls: Counter[str] = Counter()

    def enter(name: str, module: nn.Module, args: Any) -> None:
        seen.entered.append(name)

    def leave(name: str, module: nn.Module, args: Any, answer: Any) -> None:
        while seen.entered and seen.entered.pop() != name:
            pass  # the user's code caught what an inner forward raised
        number = calls[name]
        calls[name] += 1
        for path, tensor in tensors(answer):
            if tensor.is_floating_point():
                key = (name, number, path)
                seen.values[key] = [t.clone() for t in read(tensor)]
                if tensor.requires_grad:
                    tensor.register_hook(partial(arrive, key))

    def arrive(key: Key, gradient: Tensor) -> None:
        seen.gradients[key] = [t.clone() for t in read(gradient)]

    handles = [m.register_forward_pre_hook(partial(enter, name), prepend=True) for name, m in model.named_modules()]
    handles += [m.register_forward_hook(partial(leave, name)) for name, m in model.named_modules()]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


@dataclass(frozen=True)
class Tolerance:
    """When two float64 values count as equal: relative to the largest magnitude, with a floor under zeros."""

    relative: float
    floor: float

    def error(self, got: Tensor, want: Tensor) -> float:
        """Return the largest difference relative to the wanted values' largest magnitude."""
        if got.shape != want.shape:
            return float("inf")
        if want.numel() == 0:
            return 0.0
        difference = (got - want).abs().max()
        if not bool(torch.isfinite(difference)):
            same = torch.equal(got.isfinite(), want.isfinite())
            return self.error(got.nan_to_num(0, 0, 0), want.nan_to_num(0, 0, 0)) if same else float("inf")
        return float(difference / max(float(want.abs().max()), self.floor))

    def equal(self, got: Tensor, want: Tensor) -> bool:
        """Whether two values count as equal."""
        return self.error(got, want) <= self.relative


def relation(ranks: Ranks, want: Tensor, tolerance: Tolerance) -> str:
    """Say how the ranks' values make up the whole: ``whole``, ``cut``, ``sum``, or ``wrong`` if they do not."""
    if all(tolerance.equal(rank, want) for rank in ranks):
        return "whole"
    if all(rank.shape == want.shape for rank in ranks):
        return "sum" if tolerance.equal(sum(ranks[1:], ranks[0]), want) else "wrong"
    for dim in range(want.dim()):
        shapes = [rank.shape[:dim] + rank.shape[dim + 1 :] for rank in ranks if rank.dim() == want.dim()]
        whole = want.shape[:dim] + want.shape[dim + 1 :]
        fits = len(shapes) == len(ranks) and all(shape == whole for shape in shapes)
        if fits and tolerance.equal(torch.cat(ranks, dim), want):
            return "cut"
    return "wrong"
