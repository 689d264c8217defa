"""Real English text that every Python brings along, as bytes: the manual behind `help()`."""

from __future__ import annotations

from collections.abc import Iterator
from pydoc_data.topics import topics

import torch
from torch import Tensor

VOCAB = 256


def batches(steps: int, batch: int, sequence: int, seed: int = 0) -> Iterator[Tensor]:
    """Yield `steps` batches of random windows, (batch, sequence + 1) int64; the same for the same seed."""
    text = "\n".join(topics[name] for name in sorted(topics)).encode()
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        starts = torch.randint(len(data) - sequence, (batch,), generator=generator)
        yield torch.stack([data[start : start + sequence + 1] for start in starts.tolist()])
