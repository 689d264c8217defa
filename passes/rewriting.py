"""Which arguments in the user's source are written otherwise, where no attribute makes a size local."""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

from autoshard.ir import Meta
from autoshard.passes.cut import Cut
from autoshard.passes.factors import Factor, count, leaves
from autoshard.passes.sizes import Attribute, Size, Sizes
from autoshard.passes.states import Placed
from autoshard.plans import Refusal
from autoshard.provenance import attributes
from autoshard.rewrite.record import INFERRED, CallRewrite
from autoshard.rewrite.sites import Written

_ATOMS = (ast.Name, ast.Attribute, ast.Call, ast.Subscript, ast.Constant)
#: Ops that take one size of -1 and work it out from how many elements there are.
_INFERS = frozenset(["aten.view", "aten.reshape", "aten._unsafe_view"])
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
        self.ops = {op.name: op for op in traced.ops}
        self.given = Counter(name for name, dim in {(s.value, s.use.dim) for s in sizes.sizes} if isinstance(dim, int))
        self.inferred: set[str] = set()
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
                if not self._infer(uses):
                    return None
                new = INFERRED
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

    def _infer(self, uses: Iterable[Size]) -> bool:
        """Whether torch can work a size out for itself, in every use: the code gives it all others, and we too."""
        names = {size.value for size in uses}
        if names & self.inferred or not all(map(self._has_all, names)):
            return False
        self.inferred |= names
        return True

    def _has_all(self, name: str) -> bool:
        op = self.ops.get(name)
        if op is None or op.target not in _INFERS or not isinstance(op.result, Meta):
            return False
        return self.given[name] == len(op.result.shape)

    def _stop(self, size: Size, why: str) -> None:
        """Refuse the cuts of what a size counts; where it is to be whole, those that its attributes are set for."""
        op = self.ops.get(size.value)
        now = self.sizes.now(size.use.expression, self.settings)
        text = f"a size in the code does not follow the cut: {now}, needed {size.needed}; {why}"
        for cut in self._cuts(size) or self._setting(size):
            refusal = Refusal(next(iter(cut.divisions)), op.where if op else "", text)
            self.stuck.setdefault(cut.key, refusal)

    def _cuts(self, size: Size) -> list[Cut]:
        extents = [*self.sizes.extents(size.use.expression), *([size.extent] if size.extent is not None else [])]
        return [
            cut
            for cut in self.placed.chosen.cuts
            if any(value == size.value for value, _ in cut.touched)
            or (not cut.gathered and any(count(extent, cut.leaves) for extent in extents))
        ]

    def _setting(self, size: Size) -> list[Cut]:
        """Return the cuts of other sizes that are made of the same attributes, and are a rank's share."""
        mine = set(attributes(size.use.expression)) & self.settings.keys()
        others = (s for s in self.sizes.sizes if mine.intersection(attributes(s.use.expression)))
        found = (cut for other in others if other.needed != other.use.value for cut in self._cuts(other))
        return list({cut.key: cut for cut in found}.values())


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
