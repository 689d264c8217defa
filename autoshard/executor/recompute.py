"""Activation checkpointing of a module in place: no wrapper, so no name changes.

The instance's ``forward`` is replaced. Hooks stay outside: tensor-parallel conversions of the module's own boundary,
and FSDP's gathering, run once.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from autoshard._torch import SAVED_OPERATORS
from autoshard.executor.forward import Forward
from autoshard.executor.gradsum import Reads, UnitSums

MODES = ("none", "selective", "full")


def recompute(module: nn.Module, mode: str, sums: Sequence[UnitSums] = ()) -> None:
    """Let ``module`` recompute its activations in backward.

    Args:
        module: its names and state-dict keys stay.
        mode: ``"selective"`` keeps the results of matmuls and attention, ``"full"`` keeps the arguments only.
        sums: the gradient sums that parameters inside may be read through.
    """
    Recomputed(module, mode == "selective", sums).install()


class Recomputed(Forward):
    """The forward of one module, run under ``torch.utils.checkpoint`` where gradients are wanted.

    Attributes:
        selective: whether the results of matmuls and attention are kept.
        sums: the gradient sums that parameters inside may be read through.
    """

    def __init__(self, module: nn.Module, selective: bool, sums: Sequence[UnitSums]) -> None:
        super().__init__(module)
        self.selective = selective
        self.sums = sums

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward; arguments and answer are the module's own."""
        if not torch.is_grad_enabled():
            return self.inner(*args, **kwargs)
        # kwargs go in here: the forward may have an argument with the name of one of checkpoint's
        forward = partial(self._with_reads, self._reads(), kwargs)
        if self.selective:
            return checkpoint(forward, *args, use_reentrant=False, context_fn=_selective_contexts)
        return checkpoint(forward, *args, use_reentrant=False)

    def _reads(self) -> list[tuple[UnitSums, Reads]]:
        """Return what parameters are read as just now: a second run outside of the unit's forward needs the same."""
        if torch.compiler.is_compiling():
            return []
        return [(sums, reads) for sums in self.sums if (reads := sums.running()) is not None]

    def _with_reads(self, found: list[tuple[UnitSums, Reads]], kwargs: dict[str, Any], *args: Any) -> Any:
        with ExitStack() as stack:
            for sums, reads in found:
                stack.enter_context(sums.again(reads))
            return self.inner(*args, **kwargs)


def _selective_contexts() -> Any:
    return create_selective_checkpoint_contexts(keep_matmuls)


def keep_matmuls(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keep what is dear to compute: matmuls, convolutions and attention; recompute the rest."""
    return CheckpointPolicy.MUST_SAVE if operator in SAVED_OPERATORS else CheckpointPolicy.PREFER_RECOMPUTE
