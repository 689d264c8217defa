"""Hold predicted step times against measured ones: ``python benchmarks/step_time_cpu.py --write``.

The processors are probed with as many processes as train. Then small models take steps on every mesh of 4 gloo ranks,
the meshes in turn, so that a slow minute slows them all alike. It wants a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import logging
import os
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import torch
from page import put, table
from step_time_models import GLOBAL_BATCH, LENGTH, MODELS, measure

import autoshard
from autoshard.cluster import Cluster
from autoshard.plans import Mesh, Plan
from autoshard.probe import probe

WORLD = 4
#: Meshes whose measured times differ by less than this are not told apart.
NOISE = 0.1
_HEADER = ("model", "dp_replicate", "dp_shard", "tp", "predicted ms", "measured ms", "predicted rank", "measured rank")


@dataclass(frozen=True)
class Step:
    """One mesh of one model: predicted and measured seconds of a step."""

    model: str
    mesh: Mesh
    predicted: float
    measured: float


def meshes(world: int) -> list[Mesh]:
    """Return every mesh of a world."""
    degrees = [d for d in range(1, world + 1) if world % d == 0]
    return [Mesh(world // tp // shard, shard, tp) for tp in degrees for shard in degrees if world % (tp * shard) == 0]


def plans(name: str, cluster: Cluster) -> list[Plan]:
    """Plan a model on every mesh."""
    with torch.device("meta"):
        model = MODELS[name]()
    return [
        autoshard.plan(
            model,
            world=WORLD,
            tp=mesh.tp,
            dp_shard=mesh.dp_shard,
            dp_replicate=mesh.dp_replicate,
            global_batch=GLOBAL_BATCH,
            sequence=LENGTH,
            checkpointing="none",
            device=cluster,
        )
        for mesh in meshes(WORLD)
    ]


def steps(names: Iterable[str], cluster: Cluster, repetitions: int) -> list[Step]:
    """Predict and measure every mesh of every model."""
    from spawn import close_all, pool

    found = []
    for name in names:
        made = plans(name, cluster)
        ranks = pool(WORLD).run(measure, name, [plan.to_dict() for plan in made], repetitions, limit=3600.0)
        for index, plan in enumerate(made):
            slowest = max(rank[index] for rank in ranks)
            found.append(Step(name, plan.mesh, plan.meshes[0].step_seconds, slowest))
            print(found[-1], flush=True)
    close_all()
    return found


def agreement(found: Sequence[Step]) -> tuple[int, int]:
    """Return how many pairs of meshes are predicted in the order that was measured, of those that can be told apart."""
    right = total = 0
    for a, b in combinations(found, 2):
        if a.model == b.model and abs(a.measured - b.measured) > NOISE * min(a.measured, b.measured):
            total += 1
            right += (a.predicted < b.predicted) == (a.measured < b.measured)
    return right, total


def page(found: Sequence[Step], cluster: Cluster, repetitions: int) -> str:
    """Return the table, with what was found in one sentence for each model."""
    said, lines = [], []
    for name in dict.fromkeys(step.model for step in found):
        own = [step for step in found if step.model == name]
        by_prediction = sorted(own, key=lambda step: step.predicted)
        by_measure = sorted(own, key=lambda step: step.measured)
        right, total = agreement(own)
        lost = by_prediction[0].measured / by_measure[0].measured - 1
        said.append(
            f"* {name}: {right} of {total} pairs in order; the mesh predicted fastest took {lost:.0%} longer than the "
            f"fastest measured."
        )
        lines += [
            (
                name,
                step.mesh.dp_replicate,
                step.mesh.dp_shard,
                step.mesh.tp,
                f"{1e3 * step.predicted:.1f}",
                f"{1e3 * step.measured:.1f}",
                by_prediction.index(step) + 1,
                by_measure.index(step) + 1,
            )
            for step in by_measure
        ]
    device = cluster.device
    head = (
        f"Measured with {WORLD} processes on {os.cpu_count()} cores, torch {torch.__version__}; {repetitions} steps of "
        f"each mesh, the median; a global batch of {GLOBAL_BATCH} x {LENGTH} tokens, AdamW, float32. "
        f"Probed: {device.flops['float32'] / 1e9:.1f} GFLOP/s in float32, {device.memory_bandwidth / 1e9:.1f} GB/s of "
        f"memory, {cluster.link_bandwidth / 1e6:.0f} MB/s and {cluster.link_latency * 1e6:.0f} microseconds a hop "
        f"between processes. Pairs that differ by less than {NOISE:.0%} are not counted."
    )
    return "\n\n".join((head, "\n".join(said), table(_HEADER, lines)))


def main() -> None:
    """Measure, and print or write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--repetitions", type=int, default=15, help="steps of each mesh")
    parser.add_argument("--machine", type=Path, help="a file that `autoshard probe` wrote; probed where left out")
    parser.add_argument("--write", action="store_true", help="write it into docs/meshes.md")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    cluster = probe(WORLD) if options.machine is None else Cluster.load(options.machine)
    text = page(steps(options.models, cluster, options.repetitions), cluster, options.repetitions)
    print(text)
    if options.write:
        put("meshes.md", "step times", text)


if __name__ == "__main__":
    main()
