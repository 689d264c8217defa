"""Count the collectives of a step by axis, against the plan: ``--write`` fills ``docs/collectives.md``.

One process on the fake process group, as rank 0 of every world; the same steps as ``tests/parity/test_counts.py``.
"""

from __future__ import annotations

import itertools
import logging
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from page import show, table

MODELS = ("decoder", "head norms", "tied", "llama", "qwen3", "gemma2")
#: dp_replicate, dp_shard, tp
MESHES = (
    (1, 8, 1),
    (8, 1, 1),
    (16, 8, 1),
    (1, 1, 2),
    (4, 1, 2),
    (2, 4, 2),
    (1, 32, 2),
    (16, 32, 2),
    (1, 1, 4),
    (4, 64, 4),
)
#: the mesh on which the ways to train below are counted too, each with the dtype of the model
FULL = (2, 4, 2)
WAYS: tuple[tuple[dict[str, Any], torch.dtype], ...] = (
    ({"masters": "float32"}, torch.bfloat16),
    ({"mixed_precision": "bfloat16"}, torch.float32),
    ({"reshard": False}, torch.float32),
    ({"checkpointing": "selective"}, torch.float32),
)
HEADER = ("model", "dp_replicate", "dp_shard", "tp", "ranks", "steps", "collectives", "MB sent", "differences")


def steps(mesh: tuple[int, int, int]) -> Iterator[tuple[dict[str, Any], torch.dtype]]:
    """Give the options and the dtype of every step that is counted on a mesh."""
    for checkpointing, cut in itertools.product(("none", "full"), (False, True) if mesh[2] > 1 else (False,)):
        yield {"checkpointing": checkpointing, "sequence_parallel": cut}, torch.float32
    if mesh == FULL:
        yield from WAYS


def row(name: str, mesh: tuple[int, int, int]) -> tuple[object, ...]:
    """Count every step of one model on one mesh; a difference is an axis and op of which a number is not the plan's."""
    from counting import both

    from autoshard.errors import IndivisibleHeads

    ranks = mesh[0] * mesh[1] * mesh[2]
    number = collectives = size = differences = 0
    for options, dtype in steps(mesh):
        try:
            said, sent = both(name, mesh, dtype, **options)
        except IndivisibleHeads as refused:
            return (name, *mesh, ranks, f"none: {str(refused).splitlines()[0]}", "", "", "")
        number += 1
        collectives += sum(count for count, _ in sent.values())
        size += sum(nbytes for _, nbytes in sent.values())
        for key in sorted(said.keys() | sent.keys()):
            if said.get(key) != sent.get(key):
                differences += 1
                print(name, mesh, options, key, f"planned {said.get(key)}, counted {sent.get(key)}", file=sys.stderr)
    return (name, *mesh, ranks, number, collectives, f"{size / 1e6:.2f}", differences)


def main() -> int:
    """Count and show; 1 where any number differs."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    rows = [row(name, mesh) for name in MODELS for mesh in MESHES]
    counted = [one for one in rows if isinstance(one[5], int)]
    total, sent, wrong = (sum(int(str(one[index])) for one in counted) for index in (5, 6, 8))
    said = f"{total} steps, {sent:,} collectives, {wrong} differences.\n\n"
    show("collectives.md", {"counted": said + table(HEADER, rows)})
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
