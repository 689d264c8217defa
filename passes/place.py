"""Give every value its state on the tp axis and put the conversions on module boundaries.

Reads the chosen cuts. A value is **R** (the same on every rank), **V** (the same, with a partial gradient), **S** (cut)
or **P** (a partial sum). Decides where a value changes state and which parameters take a summed gradient, and sends
back cuts that no module boundary can carry out. Leaves sizes in the user's code to the next pass.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from autoshard.passes.boundary import Boundaries
from autoshard.passes.cut import Chosen, Cut
from autoshard.passes.flow import Flow, UsedBothWays, agree_over_sites
from autoshard.passes.inside import Inside
from autoshard.passes.states import Conversion, Placed, Refused, State
from autoshard.plans import Refusal
from autoshard.rewrite.record import CallRewrite


@dataclass(frozen=True)
class Place:
    """Place the states and conversions of chosen cuts.

    Attributes:
        texts: finds where values can be converted inside a module's own code; asked only where that is needed.
    """

    texts: Callable[[], Inside] | None = None

    def run(self, chosen: Chosen) -> Placed:
        """Return states and conversions, or the cuts to give up in ``refused``."""
        if not chosen.cuts:
            traced = chosen.factored.traced
            values = [*(source.name for source in traced.sources), *(op.name for op in traced.ops)]
            return Placed(chosen, dict.fromkeys(values, State.R), (), {}, frozenset(), {})
        texts: Inside | None = None
        exits: frozenset[str] = frozenset()
        both: dict[str, UsedBothWays] = {}
        while True:
            flow = Flow(chosen, frozenset(both))
            boundaries = Boundaries(flow, texts, exits)
            try:
                sums = _walk(flow, boundaries)
                agree_over_sites(flow)
            except Refused as refusal:
                if isinstance(refusal, UsedBothWays):
                    both[refusal.value] = refusal
                    continue
                if texts is None and self.texts is not None and (refusal.inside or refusal.sums):
                    texts = self.texts()
                    continue
                more = _exits(boundaries, refusal.sums) - exits
                if more:
                    exits |= more
                    continue
                # where such a parameter can enter nowhere, that it has to says most
                refusal = next((both[name] for name in refusal.op.refs() if name in both), refusal)
                blamed = _touching(chosen, refusal.values) or list(chosen.cuts)
                refused = {cut.key: Refusal(_first(cut), refusal.op.where, refusal.why) for cut in blamed}
                return Placed(chosen, {}, (), {}, frozenset(), {}, refused)
            return Placed(
                chosen,
                flow.states,
                tuple(boundaries.conversions),
                sums,
                frozenset(flow.first_rank),
                boundaries.lookups,
                rewrites=_rewrites(boundaries.conversions),
            )


def _exits(boundaries: Boundaries, sums: frozenset[str]) -> frozenset[str]:
    """Return the sums that can be reduced where they are made or taken: not those of a row-cut table."""
    flow, texts = boundaries.flow, boundaries.texts
    if texts is None:
        return frozenset()
    ops = [flow.ops[name] for name in sums if "lookup" not in flow.contracts(flow.ops[name])]
    return frozenset(op.name for op in ops if boundaries.only_taker(op) or texts.result(op) is not None)


def _rewrites(conversions: Iterable[Conversion]) -> dict[str, tuple[CallRewrite, ...]]:
    """Return the conversions inside the code of modules, as it is written then."""
    found: dict[str, dict[CallRewrite, None]] = defaultdict(dict)
    for c in conversions:
        if c.text is not None:
            share = f", {c.share!r}" if c.share else ""
            after = f"convert({c.kind!r}, {c.text.text}{share})"
            text = c.text
            found[text.module][CallRewrite(text.function, text.where, text.column, text.text, after, c.why)] = None
    return {module: tuple(rewrites) for module, rewrites in found.items()}


def _walk(flow: Flow, boundaries: Boundaries) -> dict[str, str]:
    """Run over the graph once, then place the entries; return the parameters with partial gradients."""
    flow.start()
    for op in flow.traced.ops:
        flow.step(op)
        made = flow.states[op.name]
        boundaries.leave(op)
        if flow.states[op.name] is not made:
            flow.made[op.name] = made
    for output in flow.traced.outputs:
        if flow.states[output.value] is not State.R and not output.state:
            op = flow.ops[output.value]
            raise Refused(op, f"the model returns it ({output.path or 'its result'}) while it is not whole")
    boundaries.enter_all()
    for output in flow.traced.outputs:
        if flow.states[output.value] is State.V and not output.state:
            op = flow.ops[output.value]
            raise Refused(op, f"the model returns it ({output.path or 'its result'}) with a partial gradient")
    boundaries.agree_over_calls()
    boundaries.agree_over_texts()
    return flow.grad_sums()


def _touching(chosen: Chosen, values: Iterable[str]) -> list[Cut]:
    names = set(values)
    return [cut for cut in chosen.cuts if any(value in names for value, _ in cut.touched)]


def _first(cut: Cut) -> str:
    return next(iter(cut.divisions))
