"""Whether a row-cut table may be summed over the ranks: what it returns must be linear in its rows.

Each rank looks up the rows it has and zeros for the others. The sum is the row only if nothing but linear work
follows inside the module: a norm over the row, or other rows written over it, is not.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from autoshard.plans import Plan
from autoshard.proving.double import Double
from autoshard.proving.observe import Tolerance
from autoshard.proving.proof import Culprit

_EXACT = Tolerance(1e-9, 1e-30)


def unsound_tables(model: nn.Module, plan: Plan) -> Iterator[Culprit]:
    """Yield the row-cut tables of ``plan`` whose answer is not linear in their rows; ``model`` is float64 on CPU."""
    for fqn, boundary in plan.module_plans():
        module = model.get_submodule(fqn)
        if boundary.lookup is not None and type(module).forward is not nn.Embedding.forward and not _linear(module):
            why = "what it returns is not linear in its rows: the ranks' answers do not add up to it"
            yield Culprit("nonlinear", fqn, why)


@torch.no_grad()
def _linear(module: nn.Module) -> bool:
    """Whether tables of zeros give zeros and a doubled table gives doubled answers, for every row."""
    name, table = max(module._parameters.items(), key=lambda item: 0 if item[1] is None else item[1].dim())
    assert table is not None
    numbers = torch.arange(table.shape[0])[None]

    def answer(rows: Tensor) -> Tensor:
        with Double():
            found: Tensor = torch.func.functional_call(module, {name: rows}, (numbers,))
        return found

    try:
        once, twice, never = answer(table), answer(2 * table), answer(torch.zeros_like(table))
    except (RuntimeError, TypeError, ValueError, LookupError):
        return True  # it wants other arguments: the run will tell
    return _EXACT.equal(twice, 2 * once) and not bool(never.any())
