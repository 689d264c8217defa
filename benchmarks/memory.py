"""Count bytes on each rank: ``python benchmarks/memory.py --write`` measures the first table of ``docs/memory.md``.

Four gloo ranks; the same jobs as ``tests/parity/test_memory.py``.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from page import show, table

import autoshard

MESHES = {"dp_shard=4": {"dp_shard": 4, "tp": 1}, "dp_shard=2 tp=2": {"dp_shard": 2, "tp": 2}}
HEADER = ("optimizer", "starts on", "parameters", "left of the full model", "gradients", "optimizer state")
MORE = ("before the call", "most during it", "after it", "trains")


def rows(plan: Any) -> list[tuple[object, ...]]:
    """Return one row for each way to make the optimizer and each device to start on, the worst rank's bytes."""
    from memory_workers import WAYS, measure
    from spawn import pool

    found: list[tuple[object, ...]] = []
    predicted = [f"{plan.memory_bytes[kind]:,}" for kind in ("parameters", "gradients", "optimizer")]
    found.append(("*predicted by the plan*", "", predicted[0], "0", *predicted[1:], "", "", "", "yes"))
    for way, when in WAYS.items():
        for start in ("cpu", "meta") if when in ("after", "before") else ("cpu",):
            ranks = pool(4).run(measure, plan.to_dict(), when, start, False)
            worst = {key: max(rank[key] for rank in ranks) for key in ranks[0] if key != "said"}
            numbers = [f"{worst[key]:,}" for key in ("parameters", "stale", "gradients", "optimizer")]
            call = [f"{worst[key]:,}" for key in ("before the call", "peak", "after the call")]
            found.append((way, start, *numbers, *call, "yes" if worst["trains"] else "**no**"))
    return found


def main() -> None:
    """Measure and show."""
    from memory_workers import BATCH, LENGTH, build
    from spawn import close_all

    warnings.simplefilter("ignore")
    parts = []
    for name, degrees in MESHES.items():
        ids = torch.zeros(BATCH, LENGTH, dtype=torch.long)
        plan = autoshard.plan(build(), world=4, example_inputs=(ids,), **degrees)
        unit = max(unit.parameter_bytes for unit in plan.units)
        full = sum(parameter.nbytes for parameter in build().parameters())
        parts.append(f"{name}: the full model P = {full:,} bytes, the largest unit {unit:,} bytes on one tp rank.\n")
        parts.append(table((*HEADER, *MORE), rows(plan)) + "\n")
    close_all()
    show("memory.md", {"measured": "\n".join(parts).rstrip()})


if __name__ == "__main__":
    main()
