"""Write every stage of a plan as text, one file each."""

from __future__ import annotations

from pathlib import Path

from autoshard.passes.factors import show
from autoshard.pipeline import Stages
from autoshard.plans import Plan


def dump(directory: Path, plan: Plan, stages: Stages) -> None:
    """Write ``1-traced.txt``, ``2-factored.txt``, ``3-placed.txt`` and ``plan.json`` into ``directory``."""
    directory.mkdir(parents=True, exist_ok=True)
    traced, factored, placed = stages.traced, stages.factored, stages.placed
    ops = [f"{op.name} = {op.target}({', '.join(op.refs())})  # {op.module} {op.where}" for op in traced.ops]
    (directory / "1-traced.txt").write_text("\n".join(ops) + "\n")
    lines = []
    for value in factored.dims:
        for dims in factored.tensors(value):
            state = placed.states.get(value)
            extents = ", ".join(show(d, placed.chosen.leaves_in(value)) for d in dims)
            lines.append(f"{state.value if state else '-'} {value}: {extents}")
    (directory / "2-factored.txt").write_text("\n".join(lines) + "\n")
    rows = [f"{c.kind:>10} {c.fqn} {c.side}[{c.path}] {c.value} {c.share or ''}" for c in placed.conversions]
    (directory / "3-placed.txt").write_text("\n".join(rows) + "\n")
    (directory / "plan.json").write_text(plan.to_json())
