"""One conversion for several modules that are given the same tensor: q, k and v of one x pay one all-reduce.

A slot remembers the last tensor it converted and gives its answer again for the very same one. It is emptied when
the forward of the modules' common parent ends, and again when the model's does: no activation outlives them. A
miss only costs one more collective; the gradient is the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from autoshard.executor.collectives import Axis, Conversion


class Slot:
    """The last conversion of one shared entry."""

    def __init__(self) -> None:
        self._last: tuple[Tensor, int, Conversion, Tensor] | None = None

    def convert(self, value: Tensor, conversion: Conversion, axis: Axis) -> Tensor:
        """Return ``value`` converted, from the slot where it is the same tensor, unwritten since."""
        # without a gradient R->V costs nothing, and a version is not counted in inference mode
        if not torch.is_grad_enabled() or not value.requires_grad or torch.compiler.is_compiling():
            return conversion(value, axis)
        version = value._version
        if self._last is not None:
            known, known_version, known_conversion, answer = self._last
            if known is value and known_version == version and known_conversion == conversion:
                return answer
        answer = conversion(value, axis)
        self._last = (value, version, conversion, answer)
        return answer

    def clear(self, module: nn.Module, args: Any, output: Any) -> None:
        """Forget; a forward hook."""
        self._last = None


def common_parent(model: nn.Module, names: Iterable[str]) -> nn.Module:
    """Return the innermost module with a forward of its own that holds all the named ones."""
    split = [name.split(".")[:-1] for name in names]
    shared: list[str] = []
    for steps in zip(*split, strict=False):
        if len(set(steps)) > 1:
            break
        shared.append(steps[0])
    while shared and not has_forward(model.get_submodule(".".join(shared))):
        shared.pop()
    return model.get_submodule(".".join(shared))


def has_forward(module: nn.Module) -> bool:
    """Whether the module can be called: containers such as a list of layers cannot."""
    return getattr(module.forward, "__name__", "") != "_forward_unimplemented"
