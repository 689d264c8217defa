"""Step times against the plan that torch's tutorial writes by hand: ``python benchmarks/hand_step.py --write``.

Both models live in the same processes and take steps in turn, so that a slow minute slows both alike. What is decided
is a ratio: the geometric mean over pairs, with a 95 % interval from the spread of the pairs' logarithms.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import warnings
from dataclasses import dataclass

import torch
from hand_step_models import BATCH, LENGTH, MODELS, VOCABULARY, Decoder, measure
from page import show, table

import autoshard


@dataclass(frozen=True)
class Row:
    """One model on one number of ranks."""

    ranks: int
    width: int
    hand: float
    ratio: float
    low: float
    high: float


def row(ranks: int, width: int, pairs: list[tuple[float, float]]) -> Row:
    """Return a row from the seconds of pairs of steps, by hand and ours."""
    logs = [math.log(ours / hand) for hand, ours in pairs]
    mean = statistics.fmean(logs)
    spread = 1.96 * statistics.stdev(logs) / math.sqrt(len(logs))
    low, high = math.exp(mean - spread), math.exp(mean + spread)
    return Row(ranks, width, statistics.median(h for h, _ in pairs), math.exp(mean), low, high)


def rows(ranks: int, widths: list[int], pairs: int) -> list[Row]:
    """Measure the models on a number of ranks."""
    from spawn import close_all, pool

    found = []
    for width in widths:
        ids = torch.zeros(BATCH, LENGTH, dtype=torch.long)
        plan = autoshard.plan(Decoder(width, MODELS[width]), world=ranks, tp=ranks, example_inputs=(ids,))
        timed = pool(ranks).run(measure, width, plan.to_dict(), pairs, limit=3600.0)
        slowest = [(max(h for h, _ in each), max(o for _, o in each)) for each in zip(*timed, strict=True)]
        found.append(row(ranks, width, slowest))
        print(found[-1], flush=True)
    close_all()
    return found


def page(found: list[Row], pairs: int) -> str:
    """Return the table and the mean of each number of ranks."""
    lines = [
        (r.ranks, r.width, MODELS[r.width], f"{1e3 * r.hand:.0f}", f"{r.ratio:.2f}", f"{r.low:.2f} to {r.high:.2f}")
        for r in found
    ]
    means = []
    for ranks in dict.fromkeys(r.ranks for r in found):
        mean = math.exp(statistics.fmean(math.log(r.ratio) for r in found if r.ranks == ranks))
        means.append(f"{mean:.2f} on {ranks} ranks")
    head = (
        f"{pairs} pairs of steps in turn on {os.cpu_count()} cores with gloo, torch {torch.__version__}; batch {BATCH} "
        f"x {LENGTH} tokens, a vocabulary of {VOCABULARY}, float32, AdamW. Geometric mean of the ratios: "
        f"{', '.join(means)}."
    )
    header = ("ranks (tp)", "hidden", "layers", "by hand, ms", "ratio of ours", "95 % interval")
    return head + "\n\n" + table(header, lines)


def main() -> None:
    """Measure and show."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--widths", type=int, nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--write", action="store_true", help="write docs/step_time.md")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    found = [one for ranks in options.ranks for one in rows(ranks, options.widths, options.pairs)]
    show("step_time.md", {"measured": page(found, options.pairs)})


if __name__ == "__main__":
    main()
