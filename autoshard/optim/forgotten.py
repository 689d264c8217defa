"""Optimizers that were made before sharding and not given to it: they go on stepping parameters that nobody uses."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Sequence

from torch import Tensor, nn
from torch.optim import Optimizer

from autoshard.words import counted, human_bytes

Before = Sequence["weakref.ref[Tensor]"]


def remember(model: nn.Module) -> Before:
    """Return the parameters of ``model`` as they are, weakly."""
    return [weakref.ref(parameter) for parameter in model.parameters()]


def warn_forgotten(model: nn.Module, before: Before) -> None:
    """Warn about each optimizer that still holds parameters of ``before``. Costs nothing where all of those are gone.

    Args:
        model: the sharded model.
        before: what ``remember`` returned.
    """
    now = {id(parameter) for parameter in model.parameters()}
    old = {id(p): p.nbytes for ref in before if (p := ref()) is not None and id(p) not in now}
    if not old:
        return
    # not isinstance: objects of strange classes answer to it with side effects
    optimizers = [thing for thing in gc.get_objects() if issubclass(type(thing), Optimizer)]
    for optimizer in optimizers:
        groups = getattr(optimizer, "param_groups", ())
        held = {id(p) for group in groups for p in group["params"]} & old.keys()
        if held:
            warnings.warn(
                f"{type(optimizer).__name__} still holds {counted(len(held), 'parameter')} of before, "
                f"{human_bytes(sum(old[key] for key in held))}, that the model no longer uses: its step will train "
                "nothing. Pass it with optimizer=, or make it after the model is parallelized",
                stacklevel=3,
            )
