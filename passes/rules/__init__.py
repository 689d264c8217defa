"""Op knowledge as one table: how each operator joins, splits and contracts the dims of its operands.

One file per family. An operator that is not in the table blocks everything it touches and is listed: always safe.
"""

from __future__ import annotations

from autoshard.passes.rules import attention, conv, create, index, matmul, normalise, pointwise, reduce, shape
from autoshard.passes.rules.walk import Contraction, Rule, Walk

TABLE: dict[str, Rule] = {
    **pointwise.RULES,
    **matmul.RULES,
    **shape.RULES,
    **reduce.RULES,
    **normalise.RULES,
    **attention.RULES,
    **create.RULES,
    **index.RULES,
    **conv.RULES,
}

#: Ops through which a partial sum passes unchanged in kind: f(a + b) = f(a) + f(b), and f(0) = 0.
HOMOGENEOUS = frozenset(
    f"aten.{name}"
    for name in """
    mul div neg to view reshape _unsafe_view flatten unflatten transpose permute t unsqueeze squeeze expand contiguous
    clone slice narrow select split split_with_sizes chunk unbind sum movedim float double half bfloat16
    """.split()
)

__all__ = ["HOMOGENEOUS", "TABLE", "Contraction", "Rule", "Walk"]
