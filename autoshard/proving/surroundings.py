"""What a caller's ``with`` blocks say about tensors and gradients, put aside for a proof."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def plain_surroundings() -> Iterator[None]:
    """Make gradients, and new tensors on CPU, in the block, whatever the blocks around it say.

    Works inside ``torch.no_grad``, ``torch.inference_mode``, ``torch.device`` and autocast.
    """
    with torch.inference_mode(False), torch.enable_grad(), torch.device("cpu"), torch.autocast("cpu", enabled=False):
        yield
