"""What transformers' hand-written plan styles mean: which dim of a weight and of a bias each one cuts.

Written down apart from the product's own table, which it checks.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Meaning:
    """The dims a style cuts, None for whole; whether the gradient is summed over tp.

    ``weight`` counts from the end, so that experts' weights, (experts, out, in), are cut as their matrices are.
    """

    weight: int | None
    bias: int | None
    summed: bool = False


WHOLE = Meaning(None, None)
_OUT, _IN = Meaning(-2, -1), Meaning(-1, None)

STYLES = {
    "colwise": _OUT,
    "colwise_gather_output": _OUT,
    "packed_colwise": _OUT,
    "rowwise": _IN,
    "rowwise_split_input": _IN,
    "packed_rowwise": _IN,
    "embedding_rowwise": Meaning(-2, None),
    "replicated_with_grad_allreduce": Meaning(None, None, summed=True),
    "mla_kv_a_proj": WHOLE,
    "moe_tp_experts": WHOLE,
    "moe_identity_expert": WHOLE,
    "all_reduce": WHOLE,
    "local_params": WHOLE,
    "replicate": WHOLE,
}


def meaning(fqn: str, hand: dict[str, str]) -> Meaning:
    """Return what a hand plan says of a parameter.

    A rule names a module or a parameter, ``*`` stands for a number; a rule without ``*`` comes first. A rule for a bare
    parameter of one dim cuts it along its only dim.
    """
    module = fqn.rpartition(".")[0]
    own = _rule(fqn, hand)
    if own is not None:
        cut = STYLES[own]
        return Meaning(cut.weight, None if cut.weight is None else -1)
    style = _rule(module, hand)
    return WHOLE if style is None else STYLES[style]


def _rule(name: str, hand: dict[str, str]) -> str | None:
    if name in hand:
        return hand[name]
    for pattern, style in hand.items():
        if re.fullmatch(re.escape(pattern).replace(r"\*", r"\d+"), name):
            return style
    return None


def differences(plan: Any, hand: dict[str, str]) -> list[str]:
    """Return every parameter whose cut or gradient sum is not what the hand plan means."""
    found = []
    for fqn, tensor in plan.parameters.items():
        want = meaning(tensor.tied_to or fqn, hand)
        dim = want.bias if len(tensor.shape) < 2 else want.weight
        dim = None if dim is None or not tensor.shape else dim % len(tensor.shape)
        if (tensor.tp_dim, tensor.grad_sum is not None) != (dim, want.summed):
            found.append(
                f"{fqn}: cut {tensor.tp_dim}, summed {tensor.grad_sum is not None}; hand plan {dim}, {want.summed}"
            )
    return found
