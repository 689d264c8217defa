"""Why a forward fails on a rank's share: parameters that go together, of which the plan cuts only some."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator, Mapping

from autoshard.exported import user_place
from autoshard.passes.factorise import Factored
from autoshard.passes.factors import Factor, find, leaves
from autoshard.proving.proof import Culprit
from autoshard.proving.runs import Failed
from autoshard.proving.subject import Cut

_OWN = os.sep + "autoshard" + os.sep
_Place = tuple[str, int]


def failure(failed: Failed, factored: Factored | None, cuts: Mapping[str, Cut]) -> tuple[Culprit, ...]:
    """Return the culprits of a run that raised on the ranks' shares, the most specific first.

    Args:
        failed: what was raised, and where.
        factored: the analysis, or None where there is none.
        cuts: how the plan cuts each parameter.
    """
    error = failed.error
    stack = "".join(traceback.format_tb(error.__traceback__))
    own = "\n".join(line for line in stack.splitlines() if _OWN not in line)
    first = (str(error).strip().splitlines() or [type(error).__name__])[0]
    raised = Culprit("size", failed.module, f"the forward fails on a rank's share: {first}"[:300], user_place(own))
    apart = [] if factored is None else list(_apart(factored, cuts, failed.module))
    return (*apart, raised)


def _apart(factored: Factored, cuts: Mapping[str, Cut], module: str) -> Iterator[Culprit]:
    """Yield the parameters in and around ``module`` that are whole along an extent that others there are cut along."""
    around = module.rpartition(".")[0]
    places = _places(factored, around)
    for holders in places.values():
        cut = [place for place in holders if cuts.get(place[0], Cut()).dim == place[1]]
        # of one module's own parameters it is not said which is wrong: the raised error names the module
        owners = {fqn.rpartition(".")[0] for fqn, _ in cut}
        for fqn, dim in holders if cut else ():
            if cuts.get(fqn, Cut()).dim is None and fqn.rpartition(".")[0] not in owners:
                other, other_dim = cut[0]
                why = f"it is left whole, and its dim {dim} goes with dim {other_dim} of {other}, which is cut"
                yield Culprit("size", fqn, why)


def _places(factored: Factored, around: str) -> dict[Factor, list[_Place]]:
    """Return, by the factor that a cut of a dim cuts first, the parameters below ``around`` that have such a dim."""
    found: dict[Factor, list[_Place]] = {}
    for tensor in factored.traced.parameters:
        if tensor.value is None or (around and not tensor.fqn.startswith(f"{around}.")):
            continue
        for dim, factor in enumerate(factored.single(tensor.value)):
            extents = [find(leaf) for leaf in leaves(factor) if leaf.size > 1]
            if extents:
                found.setdefault(extents[0], []).append((tensor.fqn, dim))
    return found
