"""Step times against the plan that torch's tutorial writes by hand: ``python benchmarks/hand_step.py --write``.

Both models live in the same processes and take steps in turn, so that a slow minute slows both alike. What is decided
is a ratio: the geometric mean over pairs, with a 95 % interval from the spread of the pairs' logarithms. The optimizer
does the same work under both plans: forward and backward are shown apart.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import warnings
from dataclasses import dataclass

import torch
from hand_step_models import BATCH, LAYERS, LENGTH, VOCABULARY, WIDTHS, Decoder, measure
from page import show, table

import autoshard


@dataclass(frozen=True)
class Ratio:
    """How long ours takes of what the hand plan takes: geometric mean and its 95 % interval."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, pairs: list[tuple[float, float]]) -> Ratio:
        """Return it from the seconds of pairs, by hand and ours."""
        logs = [math.log(ours / hand) for hand, ours in pairs]
        mean = statistics.fmean(logs)
        spread = 1.96 * statistics.stdev(logs) / math.sqrt(len(logs))
        return cls(math.exp(mean), math.exp(mean - spread), math.exp(mean + spread))

    def __str__(self) -> str:
        return f"{self.mean:.2f} ({self.low:.2f} to {self.high:.2f})"


@dataclass(frozen=True)
class Row:
    """One model on one number of ranks; seconds by hand are medians."""

    ranks: int
    width: int
    hand: float
    gradients: Ratio
    step: Ratio


def rows(ranks: int, widths: list[int], pairs: int) -> list[Row]:
    """Measure the models on a number of ranks; of each step, the slowest rank counts."""
    from spawn import close_all, pool

    found = []
    for width in widths:
        ids = torch.zeros(BATCH, LENGTH, dtype=torch.long)
        plan = autoshard.plan(Decoder(width), world=ranks, tp=ranks, example_inputs=(ids,))
        timed = list(zip(*pool(ranks).run(measure, width, plan.to_dict(), pairs, limit=3600.0), strict=True))
        backward = [(max(h.gradients for h, _ in each), max(o.gradients for _, o in each)) for each in timed]
        whole = [(max(h.step for h, _ in each), max(o.step for _, o in each)) for each in timed]
        hand = statistics.median(h for h, _ in backward)
        found.append(Row(ranks, width, hand, Ratio.of(backward), Ratio.of(whole)))
        print(found[-1], flush=True)
    close_all()
    return found


def page(found: list[Row], pairs: int) -> str:
    """Return the table and the means of each number of ranks."""
    lines = [(r.ranks, r.width, f"{1e3 * r.hand:.0f}", r.gradients, r.step) for r in found]
    means = []
    for ranks in dict.fromkeys(r.ranks for r in found):
        mine = [r for r in found if r.ranks == ranks]
        both = (statistics.geometric_mean(getattr(r, of).mean for r in mine) for of in ("gradients", "step"))
        means.append("on {} ranks {:.2f} and {:.2f}".format(ranks, *both))
    head = (
        f"{pairs} pairs of steps in turn on {os.cpu_count()} cores with gloo, torch {torch.__version__}; {LAYERS} "
        f"layers, batch {BATCH} x {LENGTH} tokens, a vocabulary of {VOCABULARY}, float32, AdamW. Geometric means of "
        f"the ratios, of forward and backward and of the whole step: {'; '.join(means)}."
    )
    header = ("ranks (tp)", "hidden", "forward and backward by hand, ms", "ratio of ours", "ratio of the whole step")
    return head + "\n\n" + table(header, lines)


def main() -> None:
    """Measure and show."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--widths", type=int, nargs="+", choices=WIDTHS, default=list(WIDTHS))
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--write", action="store_true", help="write docs/step_time.md")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    found = [one for ranks in options.ranks for one in rows(ranks, options.widths, options.pairs)]
    show("step_time.md", {"measured": page(found, options.pairs)})


if __name__ == "__main__":
    main()
