"""Which arguments in the user's source are written otherwise, where no attribute makes a size local."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Mapping

from autoshard.passes.factors import Factor, count, leaves
from autoshard.passes.sizes import Attribute, Size, Sizes
from autoshard.passes.states import Placed
from autoshard.plans import Refusal
from autoshard.rewrite.record import CallRewrite
from autoshard.rewrite.sites import Written

_ATOMS = (ast.Name, ast.Attribute, ast.Call, ast.Subscript, ast.Constant)
Place = tuple[str, str, str, int, str]


class Rewriting:
    """Writes the sizes that attributes leave wrong as what a rank needs.

    ``stuck`` has, after ``run``, the cuts by key that a size does not follow, each with the size's line.
    """

    def __init__(self, placed: Placed, sizes: Sizes, settings: Mapping[Attribute, int]) -> None:
        self.placed = placed
        self.sizes = sizes
        self.settings = settings
        traced = placed.chosen.factored.traced
        given = self._leaves(s.name for s in traced.sources if s.kind == "input")
        # what is the same in every run: never a batch or a sequence
        self.held = self._leaves(p.value for p in traced.parameters if p.value) - given
        self.stuck: dict[str, Refusal] = {}

    def _leaves(self, values: Iterable[str]) -> set[Factor]:
        return {leaf for value in values for dim in self.placed.chosen.factored.single(value) for leaf in leaves(dim)}

    def run(self) -> dict[str, tuple[CallRewrite, ...]]:
        """Return the rewrites by module."""
        wrong = {id(size) for size in self.sizes.wrong(self.settings)}
        places: dict[Place, dict[int, list[Size]]] = defaultdict(lambda: defaultdict(list))
        for size in self.sizes.sizes:
            written = size.use.written
            if written is not None:
                place = (written.module, written.function, written.where, written.column, written.text)
                places[place][-1 if written.item is None else written.item].append(size)
            elif id(size) in wrong:
                self._stop(size, "its code cannot be rewritten for one module")
        found: dict[str, list[CallRewrite]] = defaultdict(list)
        for place, items in places.items():
            bad = [size for uses in items.values() for size in uses if id(size) in wrong]
            if not bad:
                continue
            after = self._after(place[4], items, wrong)
            if after is None:
                for size in bad:
                    self._stop(size, "one argument would have to be two numbers, or one that inputs decide")
                continue
            why = f"it counts what is cut over {self.placed.chosen.degree} ranks"
            found[place[0]].append(CallRewrite(place[1], place[2], place[3], place[4], after, why))
        return {module: tuple(rewrites) for module, rewrites in found.items()}

    def _after(self, text: str, items: Mapping[int, list[Size]], wrong: set[int]) -> str | None:
        """Return the text on a rank, or None where the uses of one place differ, or what it must be is no constant."""
        written = next(size.use.written for uses in items.values() for size in uses)
        assert written is not None
        changed: dict[int, str] = {}
        for item, uses in items.items():
            if not any(id(size) in wrong for size in uses):
                continue
            each = {self._text(size, text if item < 0 else f"{text}[{item}]") for size in uses}
            new = each.pop()
            if each or new is None:
                return None
            changed[item] = new
        return changed[-1] if -1 in changed else _sequence(text, changed, written)

    def _text(self, size: Size, text: str) -> str | None:
        now = self.sizes.now(size.use.expression, self.settings)
        degree = self.placed.chosen.degree
        tree = ast.parse(text, mode="eval").body
        if isinstance(now, int) and now == size.needed * degree and not isinstance(tree, ast.Constant):
            return f"{text if isinstance(tree, _ATOMS) else f'({text})'} // {degree}"
        constant = size.extent is not None and all(leaf in self.held for leaf in leaves(size.extent))
        return str(size.needed) if constant or isinstance(tree, ast.Constant) else None

    def _stop(self, size: Size, why: str) -> None:
        """Refuse the cuts of what a size counts."""
        chosen = self.placed.chosen
        op = next((op for op in chosen.factored.traced.ops if op.name == size.value), None)
        now = self.sizes.now(size.use.expression, self.settings)
        text = f"a size in the code does not follow the cut: {now}, needed {size.needed}; {why}"
        extents = [*self.sizes.extents(size.use.expression), *([size.extent] if size.extent is not None else [])]
        for cut in chosen.cuts:
            touched = any(value == size.value for value, _ in cut.touched)
            if touched or any(count(extent, cut.leaves) for extent in extents):
                refusal = Refusal(next(iter(cut.divisions)), op.where if op else "", text)
                self.stuck.setdefault(cut.key, refusal)


def _sequence(text: str, changed: Mapping[int, str], written: Written) -> str:
    """Write a sequence with other items: ``(*shape[:2], shape[2] // 2, *shape[3:])``."""
    pieces: list[str] = []
    done = 0
    for item in sorted(changed):
        if item > done:
            pieces.append(f"*{text}[:{item}]" if not done else f"*{text}[{done}:{item}]")
        pieces.append(changed[item])
        done = item + 1
    if done < written.items:
        pieces.append(f"*{text}[{done}:]")
    return f"({', '.join(pieces)}{',' if len(pieces) == 1 else ''})"
