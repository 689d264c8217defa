"""Make the sizes in the user's code local: attributes to set, and where those do not do, arguments to rewrite.

Reads the placed cuts whose code has literal sizes. Traces once more with integers that remember where they came from;
each size is then a constraint, each comparison and number a side condition. Decides the fewest attributes to set, per
module, and the arguments of calls to write otherwise. Says which sizes neither makes local, and whose cuts those stop.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from autoshard.errors import TraceError
from autoshard.passes.rewriting import Rewriting
from autoshard.passes.sizes import Sizes
from autoshard.passes.states import Placed
from autoshard.passes.trace import Trace
from autoshard.plans import Refusal
from autoshard.provenance import Tracker


@dataclass(frozen=True)
class Resize:
    """Solve for attributes, and rewrite what they leave.

    Attributes:
        given: the example inputs the model was traced with, or None.
    """

    given: Any = None

    def run(self, model: nn.Module, placed: Placed) -> tuple[Placed, Mapping[str, Refusal]]:
        """Return the cuts with what makes sizes local, and the cuts, by key, that some size does not follow."""
        tracker = self._tracked(model)
        if tracker is None:
            return replace(placed, resizable=False), {}
        sizes = Sizes(placed, tracker)
        settings = sizes.solve()
        rewriting = Rewriting(placed, sizes, settings)
        rewrites = rewriting.run()
        copies = placed.chosen.factored.traced.copies
        settings.update({(fqn, name): n for (was, name), n in settings.items() for fqn in _siblings(was, copies)})
        rewrites.update({fqn: found for was, found in rewrites.items() for fqn in _siblings(was, copies)})
        every = {
            fqn: (*placed.rewrites.get(fqn, ()), *rewrites.get(fqn, ())) for fqn in {**placed.rewrites, **rewrites}
        }
        return replace(placed, settings=settings, rewrites=every, resizable=False), rewriting.stuck

    def _tracked(self, model: nn.Module) -> Tracker | None:
        """Return what became of every integer; None where the code takes no integers that are followed.

        First with those in objects that modules share, each with its own copy: code may want them to be one object.
        """
        for objects in (True, False):
            tracker = Tracker(objects=objects)
            try:
                Trace(self.given, tracker=tracker).run(model)
            except TraceError:
                continue
            return tracker
        return None


def _siblings(module: str, copies: Mapping[str, str]) -> Iterator[str]:
    """Yield the module's counterparts in the blocks that were written out as copies of the one it is in."""
    others: dict[str, list[str]] = defaultdict(list)
    for copy, pattern in copies.items():
        others[pattern].append(copy)
    for pattern, found in others.items():
        if module == pattern or module.startswith(pattern + "."):
            yield from (copy + module.removeprefix(pattern) for copy in found)
