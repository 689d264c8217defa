"""Why a tensor is cut as it is, or left whole: one sentence each."""

from __future__ import annotations

from collections.abc import Iterable

from autoshard.ir import Tensor
from autoshard.passes.cut import Cut
from autoshard.passes.factors import count
from autoshard.passes.occurrence import Division
from autoshard.passes.states import Placed


class Whys:
    """The dim a tensor is cut along, and why."""

    def __init__(self, placed: Placed) -> None:
        self.placed = placed
        self.cut_of: dict[str, Cut] = {fqn: cut for cut in reversed(placed.chosen.cuts) for fqn in cut.divisions}
        traced = placed.chosen.factored.traced
        self.summed: set[str] = set()  # parameters on the side that sums over the cut
        self.looked_up: set[str] = set()
        fqn_of = {s.name: s.fqn for s in traced.sources if s.kind == "parameter"}
        ops = {op.name: op for op in traced.ops}
        for item in placed.chosen.factored.contractions:
            rows = item.kind == "lookup" and any(placed.chosen.gathered_dim(n) == 0 for n in ops[item.op].refs())
            if rows or count(item.factor, placed.chosen.inner):
                for name in ops[item.op].refs():
                    if name in fqn_of and fqn_of[name] in self.cut_of:
                        (self.looked_up if item.kind == "lookup" else self.summed).add(fqn_of[name])
        self.summed -= placed.first_rank

    def of(self, tensor: Tensor) -> tuple[Division | None, str]:
        """Return how a tensor is divided, and why or why not."""
        cut = self.cut_of.get(tensor.fqn)
        if cut is not None:
            return self.placed.chosen.divisions[tensor.fqn], self._cut(tensor.fqn, cut)
        if tensor.fqn in self.placed.grad_sums:
            return None, self.placed.grad_sums[tensor.fqn]
        if tensor.fqn in self.placed.first_rank:
            return None, "a bias added to a partial sum: it counts once, on the first tp rank"
        if self.placed.chosen.degree == 1:
            return None, "there is one tp rank"
        if tensor.value is None:
            return None, "the traced forward does not use it"
        return None, self.placed.chosen.whys.get(tensor.fqn, "no extent of it can be cut alone")

    def _cut(self, fqn: str, cut: Cut) -> str:
        others = [f for f in cut.divisions if f != fqn]
        division = self.placed.chosen.divisions[fqn]
        if division.mixed:
            size = sum(length for _, length, _ in division.pieces)
            needed = sum(length for _, length, ways in division.pieces if ways != division.degree)
            some = f"{needed} of the {size} indices of dim {division.dim}"
            return f"held whole, as more than one rank needs {some}; each reads its part"
        if fqn in self.looked_up:
            return "rows are looked up where they live; the parts are summed"
        if cut.ends & self.placed.logits:
            return "its output stays cut: the loss works on each rank's part of it"
        if cut.gathered:
            why = self.placed.chosen.whys.get(fqn)
            return f"its output is cut, then gathered: {why}" if why else "its output is cut, then gathered"
        if fqn in self.summed:
            return "sums over what " + _short(o for o in others if o not in self.summed) + " cut"
        return "its output is cut as far as " + _short(o for o in others if o in self.summed) + " sums over it"


def _short(fqns: Iterable[str]) -> str:
    """Write names by their last two pieces, each once."""
    names = dict.fromkeys(fqn.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2] for fqn in fqns)
    return ", ".join(names) or "nothing"
