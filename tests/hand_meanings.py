"""What transformers' hand-written plan styles mean: which dim of a weight and of a bias each one cuts."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Meaning:
    """The dims a style cuts, None for whole; whether the gradient is summed over tp."""

    weight: int | None
    bias: int | None
    summed: bool = False


STYLES = {
    "colwise": Meaning(0, 0),
    "colwise_gather_output": Meaning(0, 0),
    "rowwise": Meaning(1, None),
    "embedding_rowwise": Meaning(0, None),
    "replicated_with_grad_allreduce": Meaning(None, None, summed=True),
}
WHOLE = Meaning(None, None)


def meaning(fqn: str, hand: dict[str, str]) -> Meaning:
    """Return what a hand plan says of a parameter; rules name modules, ``*`` stands for a number."""
    module = fqn.rpartition(".")[0]
    for pattern, style in hand.items():
        if re.fullmatch(re.escape(pattern).replace(r"\*", r"\d+"), module):
            return STYLES[style]
    return WHOLE


def differences(plan: Any, hand: dict[str, str]) -> list[str]:
    """Return every parameter whose cut or gradient sum is not what the hand plan means."""
    found = []
    for fqn, tensor in plan.parameters.items():
        want = meaning(tensor.tied_to or fqn, hand)
        dim = want.bias if fqn.endswith(".bias") else want.weight
        if (tensor.tp_dim, tensor.grad_sum is not None) != (dim, want.summed):
            found.append(
                f"{fqn}: cut {tensor.tp_dim}, summed {tensor.grad_sum is not None}; hand plan {dim}, {want.summed}"
            )
    return found
