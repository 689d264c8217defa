"""A plan as one screen of text: the most important line first, repeated blocks folded, every decision with its reason.

Pure and torch-free: a plan is read and explained on any machine.
"""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.text import Text

from autoshard.layout import bullets, columns, name_cell, reasoned, section, to_text
from autoshard.plans import Plan
from autoshard.report_meshes import meshes
from autoshard.report_modules import modules
from autoshard.words import counted, fold_names, human_bytes, percent

_NAMES_SHOWN = 5


def render(plan: Plan) -> RenderableType:
    """Return the plan as a rich renderable that fits 80 columns."""
    return Group(
        *_headline(plan),
        *modules(plan),
        *_replacements(plan),
        *_gradient_sums(plan),
        *_left_whole(plan),
        *_units(plan),
        *_memory(plan),
        *_collectives(plan),
        *meshes(plan),
        *_notes(plan),
    )


def render_text(plan: Plan, width: int = 80) -> str:
    """Return the plan as plain text of ``width`` columns, without colour."""
    return to_text(render(plan), width)


def render_passes(plan: Plan) -> RenderableType:
    """Return how long each pass took and what it found; a plan read from a file has no times."""
    if not plan.times:
        return section("Passes", Text("a stored plan keeps no times"))
    rows = [(time.name, f"{time.seconds * 1000:,.0f} ms", time.summary) for time in plan.times]
    total = sum(time.seconds for time in plan.times)
    return section("Passes", columns([*rows, ("total", f"{total * 1000:,.0f} ms", "")], "lr"))


def _headline(plan: Plan) -> Iterator[RenderableType]:
    mesh, coverage = plan.mesh, plan.coverage
    subject = f"{plan.model or 'the model'} on {counted(mesh.world, 'rank')}: {mesh}"
    if any(tensor.tp_dim is not None for tensor in plan.parameters.values()):
        yield Text(subject, style="bold")
        shares = f"{percent(coverage.parameter_bytes)} of parameter bytes"
        yield Text(f"cut over tp: {shares} and {percent(coverage.matmul_flops)} of matmul FLOPs")
    else:
        yield Text(f"nothing is cut over tp: {_without_tp(plan)}", style="bold yellow")
        yield Text(subject)
    notes = [(plan.warnings, "warning"), (plan.refused, "refusal")]
    if any(found for found, _ in notes):
        said = " and ".join(counted(len(found), noun) for found, noun in notes if found)
        yield Text(f"{said}: see the end", style="yellow")
    if plan.why_mesh:
        yield Text(f"why this mesh: {plan.why_mesh}")
    if plan.checkpointing != "none":
        yield Text(f"activation checkpointing: {plan.checkpointing}, as less does not fit or was not asked for")
    if not plan.reshard and plan.mesh.dp_shard > 1:
        yield Text("gathered parameters stay for backward: they fit, and are gathered once")
    yield Text()


def _without_tp(plan: Plan) -> str:
    """Say what a plan that cuts nothing over tp still does."""
    if plan.mesh.tp > 1:
        return f"the {plan.mesh.tp} ranks of that axis compute the same"
    if plan.mesh.dp_shard > 1:
        return f"parameters are sharded over dp_shard={plan.mesh.dp_shard} only"
    return "each rank holds the whole model"


def _replacements(plan: Plan) -> Iterator[RenderableType]:
    """Modules of torch that are replaced, by reason."""
    groups: dict[tuple[str, str], list[str]] = {}
    for one in plan.replacements:
        groups.setdefault((one.kind, one.why), []).append(one.fqn or "(root)")
    if groups:
        yield section("Replaced in place by an equivalent with the same parameters", columns(reasoned(groups), "nl"))


def _gradient_sums(plan: Plan) -> Iterator[RenderableType]:
    """Parameters that are whole on every tp rank and whose gradient is not."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name, tensor in plan.parameters.items():
        if tensor.grad_sum is not None:
            parts = tensor.grad_sum.parts
            rows = (
                "" if parts is None else f" for rows {', '.join(f'{low}-{low + length - 1}' for low, length in parts)}"
            )
            groups.setdefault((f"sum over {tensor.grad_sum.ranks} tp ranks{rows}", tensor.why), []).append(name)
    if groups:
        yield section("Partial gradients", columns(reasoned(groups), "nl"))


def _left_whole(plan: Plan) -> Iterator[RenderableType]:
    """What is not cut over tp, grouped by reason, the largest share first."""
    shares: dict[str, float] = {}
    names: dict[str, list[str]] = {}
    for name, share, why in plan.coverage.left:
        shares[why] = shares.get(why, 0) + share
        names.setdefault(why, []).append(name)
    order = sorted(shares, key=lambda why: -shares[why])
    # with a single tp rank there is nothing to be left out of: the first line says so
    if order and plan.mesh.tp > 1:
        rows = [(percent(shares[why]), name_cell(_some(fold_names(names[why]))), why) for why in order]
        yield section("Left whole on every tp rank (share of parameter bytes)", columns(rows, "rnl"))


def _some(names: list[str]) -> list[str]:
    """Return the first names, and how many more there are."""
    hidden = len(names) - _NAMES_SHOWN
    return names if hidden <= 1 else [*names[:_NAMES_SHOWN], f"({hidden} more: see --json)"]


def _units(plan: Plan) -> Iterator[RenderableType]:
    groups: dict[str, list[str]] = {}
    for unit in plan.units:
        size = f"{counted(unit.num_parameters, 'parameter')}, {human_bytes(unit.parameter_bytes)} when gathered"
        groups.setdefault(size, []).append(unit.module)
    # with one data rank nothing is gathered
    if groups and plan.mesh.data > 1:
        rows = [(name_cell(fold_names(names)), size) for size, names in groups.items()]
        yield section("FSDP units, each gathered and freed as one", columns(rows, "nl"))


def _memory(plan: Plan) -> Iterator[RenderableType]:
    if not plan.memory_bytes:
        return
    rows = [(name.replace("_", " "), human_bytes(size)) for name, size in plan.memory_bytes.items()]
    work = plan.workload
    title = f"Bytes per rank (batch {work.batch}, sequence {work.sequence}, {work.dtype}, {work.optimizer})"
    when = f"at most, {plan.peak_when}" if plan.peak_when else "total"
    yield section(title, columns([*rows, (when, Text(human_bytes(plan.total_bytes), style="bold"))], "lr"))


def _collectives(plan: Plan) -> Iterator[RenderableType]:
    rows = [(one.axis, one.op, f"{one.count:,}", human_bytes(one.bytes), one.what) for one in plan.collectives]
    if rows:
        title = ("axis", "op", "count", "bytes", "of")
        header = [Text(word, style="dim") for word in title]
        asked = plan.workload.tp_reduced
        sums = f" (sums over tp in {asked})" if asked is not None and plan.mesh.tp > 1 else ""
        yield section(f"Collectives per step{sums}", columns([header, *rows], "llrrl"))


def _notes(plan: Plan) -> Iterator[RenderableType]:
    """Assumptions, warnings and refusals: what the plan rests on and what it could not do."""
    if plan.assumptions:
        yield section("Assumptions", bullets(plan.assumptions))
    if plan.warnings:
        yield section("Warnings", bullets(plan.warnings, style="yellow"))
    groups: dict[tuple[str, str], list[str]] = {}
    for refusal in plan.refused:
        groups.setdefault((refusal.where, refusal.why), []).append(refusal.fqn)
    if groups:
        yield section("Refused", columns(reasoned(groups), "nl"))
