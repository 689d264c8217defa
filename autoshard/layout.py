"""The few shapes that reports are made of: sections, columns without rules, names that break at their dots."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Mapping, Sequence

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from autoshard.words import fold_names

NAME_WIDTH = 36
_GAP = 2
_INDENT = 2


def section(title: str, *body: RenderableType) -> RenderableType:
    """Return a title in bold with its body indented below, and an empty line after."""
    return Group(Text(title, style="bold"), *(Padding(part, (0, 0, 0, _INDENT)) for part in body), Text())


def columns(rows: Iterable[Sequence[Text | str]], kinds: str = "") -> Table:
    """Return rows as columns without rules; cells that are too wide continue on the next line, never cut off.

    Args:
        rows: the cells, each row as long as the first.
        kinds: a letter for each column: ``l`` text, ``r`` numbers (to the right, not wrapped), ``n`` names of
            ``name_cell`` (not wrapped again); ``l`` where left out.
    """
    table = Table.grid(padding=(0, _GAP, 0, 0))
    rows = [[cell if isinstance(cell, Text) else Text(cell) for cell in row] for row in rows]
    for index in range(len(rows[0]) if rows else 0):
        kind = kinds[index : index + 1] or "l"
        table.add_column(justify="right" if kind == "r" else "left", overflow="fold", no_wrap=kind in "rn")
    for row in rows:
        table.add_row(*row)
    return table


def reasoned(groups: Mapping[tuple[str, str], Iterable[str]]) -> Iterator[tuple[Text, Text]]:
    """Yield a row for each decision: the names it concerns, and beside them the decision with its reason below.

    Args:
        groups: ``(decision, why)`` to names, which are folded here.
    """
    for (decision, why), names in groups.items():
        text = Text(decision)
        if why:
            text.append(f"\n{why}" if decision else why, style="dim")
        yield name_cell(fold_names(names)), text


def bullets(texts: Iterable[str], style: str = "") -> Table:
    """Return one wrapped paragraph per text, each with a dash."""
    return columns([("-", Text(text, style=style)) for text in texts])


def name_cell(names: Iterable[str]) -> Text:
    """Return dotted names one under the other; what is longer than ``NAME_WIDTH`` breaks before one of its dots."""
    return Text("\n".join(line for name in names for line in _break_at_dots(name or "(root)")))


def _break_at_dots(name: str) -> list[str]:
    """Split a name in lines of at most ``NAME_WIDTH`` characters, the later ones indented."""
    lines: list[str] = []
    while len(name) > NAME_WIDTH:
        dot = name.rfind(".", 1, NAME_WIDTH + 1)
        cut = dot if dot > 0 else NAME_WIDTH
        lines.append(name[:cut])
        name = "  " + name[cut:]
    return [*lines, name]


def to_text(renderable: RenderableType, width: int) -> str:
    """Return what a terminal of ``width`` columns without colour would show; no line ends in spaces."""
    sink = io.StringIO()
    console = Console(file=sink, width=width, color_system=None, force_terminal=False, legacy_windows=False)
    console.print(renderable)
    return "\n".join(line.rstrip() for line in sink.getvalue().splitlines()).rstrip("\n") + "\n"
