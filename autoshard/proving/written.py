"""In the simulation, tensors that the user's code makes and then writes a rank's values into.

What a factory makes is one tensor for all simulated ranks. Written in place with values that each rank has of its own,
it would take those of every rank, one after the other. So what is made to be written is one tensor per rank at once.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from autoshard._torch import lift

_MADE = frozenset(
    f"{prefix}{name}{suffix}"
    for name in ("zeros", "ones", "empty", "full")
    for prefix, suffix in (("", ""), ("", "_like"), ("new_", ""))
)


class OnePerRank(TorchFunctionMode):
    """Makes what a factory returns one tensor per rank."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run ``func``; lift what it made."""
        made = func(*args, **(kwargs or {}))
        return one_per_rank(made) if getattr(func, "__name__", "") in _MADE else made


def one_per_rank(tensor: Tensor) -> Tensor:
    """Return a plain floating-point tensor as one per simulated rank, also what is made like it; all else as it is.

    Integers and masks are left: the code asks for their values, and torch.vmap takes them apart.
    """
    plain = type(tensor) is Tensor and tensor.is_floating_point() and not tensor.requires_grad
    return lift(tensor) if plain else tensor
