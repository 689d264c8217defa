"""What pricing reads of a graph that no cut changes: the FSDP unit of each op, and what autograd keeps of it.

Found once for all tp degrees. Blocks that were written out as copies of one that was traced keep what that one keeps.
"""

from __future__ import annotations

from collections.abc import Sequence

from autoshard.ir import Traced
from autoshard.passes.kept import Keeping, Kept, Layout
from autoshard.passes.weights import main_dtype


class Homes:
    """The ops of each FSDP unit.

    Attributes:
        traced: the graph.
        units: names of the units' modules, innermost first, the root last.
        ordered: the same in the order of forward, the root last.
        blocks: those that checkpointing recomputes.
        main: the dtype of most parameter bytes.
        made: the names of each unit's ops, in order.
        kept: what autograd keeps, by op; of those in copies nothing is said.
        layouts: how each value lies in memory, one for each tensor it holds.
    """

    def __init__(self, traced: Traced, units: Sequence[str]) -> None:
        self.traced = traced
        self.units = tuple(units)
        self.blocks = _blocks(traced, self.units)
        self.main = main_dtype(traced)
        self.made: dict[str, list[str]] = {unit: [] for unit in self.units}
        self.kept: dict[str, Kept] = {}
        self._known: dict[str, str] = {}
        keeping = Keeping(traced)
        entered: dict[str, None] = {}
        for op in traced.ops:
            unit = self.of(op.module)
            entered[unit] = None
            self.made[unit].append(op.name)
            if unit in traced.copies:
                keeping.skip(op)
            else:
                self.kept[op.name] = keeping.run(op)
        self.layouts: dict[str, tuple[Layout | None, ...]] = keeping.layouts
        self.ordered = (*(unit for unit in dict.fromkeys([*entered, *self.units]) if unit), "")

    def of(self, module: str) -> str:
        """Return the innermost unit around a module."""
        if module not in self._known:
            inner = module
            while inner and inner not in self.made:
                inner = inner.rpartition(".")[0]
            self._known[module] = inner
        return self._known[module]


def _blocks(traced: Traced, units: tuple[str, ...]) -> frozenset[str]:
    """Return the units that checkpointing recomputes: the outermost ones with modules inside."""
    around = {call.fqn.rpartition(".")[0] for call in traced.calls}
    inside = {".".join(fqn.split(".")[: i + 1]) for fqn in around for i in range(fqn.count(".") + 1)}
    found: list[str] = []
    for unit in sorted((u for u in units if u), key=lambda u: u.count(".")):
        if unit in inside and not any(unit.startswith(outer + ".") for outer in found):
            found.append(unit)
    return frozenset(found)
