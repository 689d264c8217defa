"""Measure every optimizer of torch on sharded parameters: ``python benchmarks/optimizers.py --write``.

Twice each: on a simulated 2 x 2 mesh in this process, and on 2 real gloo ranks; two steps, against the same on plain
parameters. Prints the table of ``docs/optimizers.md``, and says where it contradicts ``autoshard/optim/table.py``.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

import torch
from page import show, table
from torch import nn, optim
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from autoshard.optim.table import NO_OPTION, REFUSED, TABLE, WAYS, Support
from autoshard.optim.trial import try_out

SHAPES = {0: (), 1: (6,), 2: (6, 4), 3: (6, 4, 2)}


def dims(support: Support) -> list[int]:
    """Return the dims of the parameters that are tried: Muon takes matrices only."""
    return [2, 2] if support.kind is optim.Muon else [0, 1, 2, 3]


def on_ranks(row: int, way: str) -> tuple[str, float]:
    """Take two steps on this rank's rows; return the error, or the largest difference relative to the change."""
    support = TABLE[row]
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    generator = torch.Generator().manual_seed(0)
    values, *grads = ([torch.randn(SHAPES[d], generator=generator) for d in dims(support)] for _ in range(3))

    def cut(value: torch.Tensor) -> DTensor:
        return distribute_tensor(value.clone(), mesh, [Shard(0) if value.dim() else Replicate()], src_data_rank=None)

    plain = [nn.Parameter(value.clone()) for value in values]
    sharded = [nn.Parameter(cut(value)) for value in values]
    try:
        for parameters, form in ((plain, torch.clone), (sharded, cut)):
            optimizer: Any = support.kind(parameters, **support.options(way))  # type: ignore[call-arg]
            closure = [lambda: torch.zeros(())] * (support.kind is optim.LBFGS)
            for gradients in grads:
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    parameter.grad = form(gradient)
                optimizer.step(*closure)
    except (RuntimeError, NotImplementedError, AssertionError) as error:
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0]}", 0.0
    change = max(float((p - v).detach().abs().max()) for p, v in zip(plain, values, strict=True))
    gots = [parameter.detach().full_tensor() for parameter in sharded]  # type: ignore[attr-defined]
    return "", max(float((got - p.detach()).abs().max()) for got, p in zip(gots, plain, strict=True)) / change


def main() -> int:
    """Measure, show, and return how many cells contradict the table."""
    from spawn import close_all, pool

    warnings.simplefilter("ignore")
    rows, wrong, reasons = [], 0, []
    for number, support in enumerate(TABLE):
        cells = []
        for way in WAYS:
            expected = support.verdict(way)
            if expected == NO_OPTION:
                cells.append("-")
                continue
            outcome = try_out(lambda p, s=support, w=way: s.kind(p, **s.options(w)), dims(support))  # type: ignore[misc, call-arg]
            error, difference = pool(2).run(on_ranks, number, way)[0]
            fails = [bool(outcome.error or outcome.untested), bool(error)]
            worst = max(difference, outcome.difference)
            cells.append(REFUSED if expected == REFUSED else f"{expected} ({f'{worst:.2g}' if worst else 'equal'})")
            if fails != [expected == REFUSED] * 2:
                wrong += 1
                print(f"{support.kind.__name__} {way}: table says {expected}, got {outcome} and {error or difference}")
            if error:
                reasons.append((support.kind.__name__, way, f"`{error[:110]}`"))
        notes = [support.note] * bool(support.note) + [f"use {support.instead}"] * bool(support.instead)
        rows.append((f"`{support.kind.__name__}`", *cells, "; ".join(notes)))
    close_all()
    show(
        "optimizers.md",
        {
            "table": table(("optimizer", *(f"`{way}`" for way in WAYS), "note"), rows),
            "reasons": table(("optimizer", "kernels", "what torch says on sharded parameters"), reasons),
        },
    )
    return wrong


if __name__ == "__main__":
    sys.exit(main())
