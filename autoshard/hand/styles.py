"""What the style names of hand-written plans mean, in the words of a plan of ours.

The names and their meanings are those of transformers 5.24. A rule that names a module cuts the module's own
parameters and converts at its boundary; a rule that names a parameter only cuts that.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Meaning:
    """One style.

    Attributes:
        matrix: the dim that is cut of a parameter of two dims or more, counted from the end; None for whole.
        vector: the same of a parameter of one dim.
        halves: whether a matrix is two parts laid end to end along that dim, each cut.
        inputs: positions of the forward's arguments and their conversions.
        output: conversion of the answer, or None.
        lookup: whether the first argument holds row numbers of a row-cut table.
        bias_once: whether whole vectors of the module are added to a partial sum.
        summed: whether the module's own parameters have a partial gradient.
        tail: whether the answer's last elements (how many, the model's config says) go on to divided work.
    """

    matrix: int | None = None
    vector: int | None = None
    halves: bool = False
    inputs: tuple[tuple[int, str], ...] = ()
    output: str | None = None
    lookup: bool = False
    bias_once: bool = False
    summed: bool = False
    tail: bool = False

    @property
    def cuts(self) -> bool:
        """Whether it cuts anything."""
        return self.matrix is not None or self.vector is not None


_ENTER = ((0, "R->V"),)
_GATHERED = Meaning(-2, -1, inputs=_ENTER, output="S(-1)->R")
_SPLIT = Meaning(-1, None, inputs=((0, "R->S(-1)"),), output="P->R", bias_once=True)

STYLES = {
    "colwise": Meaning(-2, -1, inputs=_ENTER),
    "colwise_gather_output": _GATHERED,
    "colwise_rep": _GATHERED,
    "rowwise": Meaning(-1, None, output="P->R", bias_once=True),
    "rowwise_split_input": _SPLIT,
    "rowwise_rep": _SPLIT,
    "embedding_rowwise": Meaning(-2, None, output="P->R", lookup=True),
    "embedding_colwise": Meaning(-1, None, output="S(-1)->R"),
    "packed_colwise": Meaning(-2, -1, halves=True, inputs=_ENTER),
    "packed_rowwise": Meaning(-1, None, halves=True),
    "replicated_with_grad_allreduce": Meaning(summed=True),
    "sequence_parallel": Meaning(summed=True),
    "moe_tp_experts": Meaning(inputs=((0, "R->V"), (2, "R->V")), output="P->R"),
    "moe_identity_expert": Meaning(inputs=((0, "V->P"),)),
    "mla_kv_a_proj": Meaning(tail=True),
    "all_reduce": Meaning(output="P->R"),
    "local_params": Meaning(),
    "replicate": Meaning(),
}

#: Styles of expert parallelism, which the executor does not have.
EXPERT_PARALLEL = frozenset({"grouped_gemm", "ep_dispatch_experts", "ep_router"})
