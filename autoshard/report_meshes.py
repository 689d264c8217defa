"""The meshes that were priced as tables: those of one plan, and the best of each of several settings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from autoshard.layout import columns, section
from autoshard.plans import AXES, MeshChoice, Plan
from autoshard.words import human_bytes

if TYPE_CHECKING:
    from autoshard.passes.formula import Formulas

_SHOWN = 8
_MOMENTS = ("at the loss", "in the optimizer's step")
_DEGREES = [axis.removeprefix("dp_").removesuffix("licate") for axis in AXES]


def meshes(plan: Plan) -> Iterator[RenderableType]:
    """Yield the meshes of a plan, the chosen one first."""
    if not plan.meshes:
        return
    header = ("", *_DEGREES, "bytes", "recompute", "batch", "tokens/s", "time goes to")
    rows: list[tuple[Text | str, ...]] = [_dim(header)]
    for choice in plan.meshes[:_SHOWN]:
        rows.append(("*" if choice.mesh == plan.mesh else "", *_cells(choice)))
    hidden = len(plan.meshes) - _SHOWN
    if hidden > 0:
        rows.append(("",) * (len(header) - 1) + (f"({hidden} more: see --json)",))
    where = f" of {plan.device}" if plan.device else ""
    title = f"Meshes (* chosen; bytes of a rank, largest batch, tokens a second{where})"
    yield section(title, columns(rows, "lrrrrlrrl"))


def what_if(name: str, rows: Sequence[tuple[object, MeshChoice]]) -> RenderableType:
    """Return the best mesh for each value of a setting."""
    header = (name.replace("_", " "), *_DEGREES, "bytes", "recompute", "batch", "tokens/s", "time goes to")
    cells = [(str(value), *_cells(choice)) for value, choice in rows]
    title = "What if (bytes of a rank, largest batch, tokens a second of each device)"
    return section(title, columns([_dim(header), *cells], "rrrrrlrrl"))


def _cells(choice: MeshChoice) -> tuple[str, ...]:
    degrees = [str(getattr(choice.mesh, axis)) for axis in AXES]
    if not choice.total_bytes:
        return (*degrees, "", "", "", "", choice.verdict)
    batch = "" if choice.max_batch is None else f"{choice.max_batch:,}"
    speed = f"{choice.tokens_per_second:,.0f}"
    return (*degrees, human_bytes(choice.total_bytes), choice.checkpointing, batch, speed, choice.verdict)


def _dim(words: Sequence[str]) -> tuple[Text, ...]:
    return tuple(Text(word, style="dim") for word in words)


def written_out(formulas: Formulas) -> RenderableType:
    """Return the cost of a plan as expressions."""
    memory = [(name, Text(str(size))) for name, size in formulas.memory.items() if name != "peak"]
    sent = [(name, Text(str(size))) for name, size in formulas.sent.items()]
    sides = (_MOMENTS[0], _MOMENTS[1])
    moments = [(name, Text(str(size))) for name, size in formulas.moments.items() if name in sides]
    blocks = [(name, Text(str(size))) for name, size in formulas.moments.items() if name not in sides]
    # of equal blocks the first and the last in backward say what lies between
    shown = blocks if len(blocks) <= 4 else [*blocks[:2], *blocks[-2:]]
    cuts = f"any degree that cuts what {formulas.tp} cuts, t" if formulas.tp > 1 else "t"
    return Group(
        Text(f"B sequences a data rank, T tokens each; tp is {cuts}; dp_shard is s. See docs/cost.md."),
        Text(),
        section("Bytes of a rank", columns(memory, "nl")),
        section("Beside parameters and optimizer, the largest counts", columns([*moments, *shown], "nl")),
        section("Bytes sent in a step", columns(sent, "nl")),
        section("FLOPs of matmuls and attention in a forward", Text(str(formulas.flops))),
    )
