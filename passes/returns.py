"""What modules return while it is not whole, and nobody in the trace takes: attention weights, for example.

Another call of the model may hand it out (a flag asks for it). The plan says how it is then made whole.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from autoshard.passes.factors import count, flat, least_ways
from autoshard.passes.states import Placed, State

#: What cannot be made whole by joining equal slices.
REFUSED = "refuse"


def find_returns(placed: Placed) -> dict[str, dict[str, str]]:
    """Return the conversion by output path, by name of the innermost module that returns the value.

    ``S(d)->R`` and ``P->R`` as at boundaries; ``refuse`` where no conversion makes it whole.
    """
    traced = placed.chosen.factored.traced
    calls = {call.id: call for call in traced.calls}
    users: dict[str, list[tuple[int, ...]]] = defaultdict(list)
    for op in traced.ops:
        for name in dict.fromkeys(op.refs()):
            users[name].append(op.calls)
    kept = {output.value for output in traced.outputs}
    done = {(c.call, c.path) for c in placed.conversions if c.side == "outputs"}
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for op in traced.ops:
        if placed.states.get(op.name) not in (State.S, State.P) or not op.calls or op.name in kept:
            continue
        call = calls[op.calls[-1]]
        if all(call.id in user for user in users[op.name]):
            for path, value in call.outputs.items():
                if value == op.name and (call.id, path) not in done:
                    found[call.fqn][path] = _whole(placed, op.name)
    return _agreeing(placed, found)


def _whole(placed: Placed, value: str) -> str:
    if placed.states[value] is State.P:
        return "P->R"
    cut, dims = placed.chosen.leaves_in(value), placed.chosen.factored.single(value)
    held = [index for index, dim in enumerate(dims) if count(dim, cut)]
    if len(held) == 1:
        dim = dims[held[0]]
        # slices of the major factor are slices of the dim
        if least_ways(flat(dim)[0], cut, placed.chosen.ways) == placed.chosen.degree:
            return f"S({held[0] - len(dims)})->R"
    return REFUSED


def _agreeing(placed: Placed, found: Mapping[str, dict[str, str]]) -> dict[str, dict[str, str]]:
    """Leave out outputs that another call of the module takes up: a hook acts on all of them."""
    taken = {(c.fqn, c.path) for c in placed.conversions if c.side == "outputs"}
    kept = {fqn: {p: how for p, how in paths.items() if (fqn, p) not in taken} for fqn, paths in found.items()}
    return {fqn: paths for fqn, paths in kept.items() if paths}
