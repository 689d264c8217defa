"""Chooses and places cuts for a tp degree, again and again, until no pass sends one back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from autoshard.passes.cut import ChooseCuts, Chosen
from autoshard.passes.cut_logits import CutLogits
from autoshard.passes.factorise import Factored
from autoshard.passes.inside import Inside
from autoshard.passes.localise import Localise
from autoshard.passes.occurrence import Occurrences
from autoshard.passes.place import Place
from autoshard.passes.resize import Resize
from autoshard.passes.states import Placed
from autoshard.plans import Refusal


class Solver:
    """Chooses and places cuts until nothing is sent back, once per tp degree."""

    def __init__(
        self,
        factored: Factored,
        pinned: Mapping[str, str],
        weigh: bool,
        texts: Callable[[], Inside],
        cut_logits: bool = False,
    ) -> None:
        self.index = Occurrences(factored)
        self.cut_logits = cut_logits
        self.choose = ChooseCuts(1, {}, pinned, weigh)
        self.texts = texts
        self.patterns: dict[Any, Placed] = {}
        self.banned: dict[int, dict[str, Refusal]] = {}
        self.placed: dict[int, Placed] = {}
        self.followed: set[int] = set()

    def place(self, tp: int) -> Placed:
        """Return the placed cuts for a degree."""
        while tp not in self.placed:
            banned = self.banned.setdefault(tp, {})
            placed = self._laid(replace(self.choose, degree=tp, banned=dict(banned)).run(self.index))
            if placed.refused:
                banned.update(placed.refused)
            else:
                self.placed[tp] = CutLogits(self.cut_logits).run(placed)
        return self.placed[tp]

    def _laid(self, chosen: Chosen) -> Placed:
        """Return the placed cuts: once for all degrees that cut the same."""
        if chosen.pattern in self.patterns:
            return replace(self.patterns[chosen.pattern], chosen=chosen)
        placed = Place(self.texts).run(chosen)
        if not placed.refused:
            self.patterns[chosen.pattern] = placed
        return placed

    def localise(self, model: nn.Module, tp: int, given: Any) -> Placed:
        """Return the placed cuts that the user's code follows, with attributes set and calls rewritten for that."""
        while tp not in self.followed:
            placed = self.place(tp)
            refused = Localise(given).run(model, placed)
            if refused and placed.resizable:
                placed, stuck = Resize(given).run(model, placed)
                helped = placed.settings or placed.rewrites
                # a size that nothing makes local says more than the line that it breaks
                refused = stuck or (Localise(given).run(model, placed) if helped else refused)
            if refused:
                self.banned[tp].update(refused)
                del self.placed[tp]
            else:
                self.placed[tp] = placed
                self.followed.add(tp)
        return self.placed[tp]

    def refusals(self, tp: int) -> list[Refusal]:
        """Return what was sent back for a degree."""
        cut = {fqn for c in self.place(tp).chosen.cuts for fqn in c.divisions}
        return [r for r in self.banned.get(tp, {}).values() if r.fqn not in cut]
