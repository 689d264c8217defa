"""Which module calls draw random numbers on a rank's share, and must not draw the same ones on every rank.

All ranks of a tp group draw from one stream, so that what is whole stays the same on them. On a rank's share that would
drop the same places of every share: the module whose own code draws there gets a stream of the rank's own
(``per_rank``), and a module inside it that draws on whole values keeps the common one (``shared``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from autoshard.ir import Op, Traced
from autoshard.passes.factors import least_ways
from autoshard.passes.rules.opaque import OPAQUE
from autoshard.passes.states import Placed, State
from autoshard.plans import SEQUENCE

_ATTENTION = "aten.scaled_dot_product_attention"
_DROPOUTS = frozenset(["dropout", "native_dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout"])
_ALWAYS = frozenset(
    """
    bernoulli cauchy exponential geometric log_normal multinomial normal poisson rand rand_like randint randint_like
    randn randn_like random randperm rrelu uniform
    """.split()
)

_NOTHING: Mapping[str, int] = {}


@dataclass(frozen=True)
class Draws:
    """Where random numbers are drawn.

    Attributes:
        modules: ``per_rank``, ``sequence`` or ``shared``, by name of a module whose forward does not just go on with
            the stream.
        mixed: ops on a rank's share in code that draws on whole values too: they draw the same on every rank.
    """

    modules: Mapping[str, str]
    mixed: tuple[Op, ...]


def find_draws(placed: Placed, in_training: Mapping[str, int] = _NOTHING) -> Draws:
    """Return where the ops of a placed graph draw, whether or not the mode it was traced in lets them.

    Args:
        placed: the graph.
        in_training: how often the own code of a module was heard to draw in training. Where that is more than its
            traced ops say, whatever drops nothing there may do so.
    """
    traced = placed.chosen.factored.traced
    fqn_of = {call.id: call.fqn for call in traced.calls}
    shares: dict[str, list[Op]] = {}
    wholes: dict[str, list[Op]] = {}
    modules: dict[str, str] = {}
    for home, ops in draw_homes(traced, in_training).items():
        if all(op.name in placed.sequence.dims for op in ops):
            modules[home] = SEQUENCE
            continue
        for op in ops:
            (shares if _on_shares(placed, op) else wholes).setdefault(home, []).append(op)
    modules |= {fqn: "per_rank" for fqn in shares if fqn not in wholes}
    for fqn, ops in wholes.items():
        if any(modules.get(fqn_of[call]) in ("per_rank", SEQUENCE) for op in ops for call in op.calls):
            modules[fqn] = "shared"
    return Draws(modules, tuple(op for fqn in shares if fqn in wholes for op in shares[fqn]))


def draw_homes(traced: Traced, in_training: Mapping[str, int] = _NOTHING) -> dict[str, list[Op]]:
    """Return the ops that draw, or may in training, by name of the module whose own code they are in."""
    fqn_of = {call.id: call.fqn for call in traced.calls}
    drawing = {op.name for op in traced.ops if draws(op)}
    plain = Counter(_home(op, fqn_of) for op in traced.ops if op.name in drawing)
    found: dict[str, list[Op]] = {}
    for op in traced.ops:
        home = _home(op, fqn_of)
        hidden = in_training.get(home, 0) > plain[home] and (op.target == _ATTENTION or _name(op) in _DROPOUTS)
        if op.name in drawing or hidden:
            found.setdefault(home, []).append(op)
    return found


def draws(op: Op) -> bool:
    """Whether an op draws random numbers, in training at least; code that was not traced may."""
    if op.target == _ATTENTION:
        return bool(op.arguments.get("dropout_p"))
    if _name(op) in _DROPOUTS:
        return bool(op.arguments.get("p"))
    return _name(op) in _ALWAYS or op.target == OPAQUE


def _home(op: Op, fqn_of: Mapping[int, str]) -> str:
    return fqn_of[op.calls[-1]] if op.calls else ""


def _name(op: Op) -> str:
    return op.target.removeprefix("aten.").rstrip("_")


def _on_shares(placed: Placed, op: Op) -> bool:
    """Whether each rank draws for places that no other rank draws for."""
    if placed.states.get(op.name) is not State.S:
        return False
    dims = next(iter(placed.chosen.factored.tensors(op.name)), [])
    if op.target == _ATTENTION:
        dims = dims[:-1]  # what is dropped is a weight of a query and a key, whatever becomes of the values
    cut = placed.chosen.leaves_in(op.name)
    return prod(least_ways(dim, cut, placed.chosen.ways) for dim in dims) == placed.chosen.degree
