"""Op knowledge as one table: how each operator joins, splits and contracts the dims of its operands.

One file per family. An operator that is not in the table blocks everything it touches and is listed: always safe.
"""

from __future__ import annotations

from autoshard.passes.rules import (
    attention,
    conv,
    create,
    index,
    matmul,
    normalise,
    opaque,
    part,
    pointwise,
    reduce,
    shape,
    space,
)
from autoshard.passes.rules.walk import Contraction, Literal, Rule, Walk


def _named(names: str) -> frozenset[str]:
    return frozenset(f"aten.{name}" for name in names.split())


TABLE: dict[str, Rule] = {
    **pointwise.RULES,
    **matmul.RULES,
    **shape.RULES,
    **part.RULES,
    **reduce.RULES,
    **normalise.RULES,
    **attention.RULES,
    **create.RULES,
    **index.RULES,
    **conv.RULES,
    **space.RULES,
    **opaque.RULES,
}

#: Ops through which a partial sum passes unchanged in kind: f(a + b) = f(a) + f(b), and f(0) = 0.
HOMOGENEOUS = _named("""
    mul mul_ div neg to view reshape _unsafe_view flatten unflatten transpose permute t unsqueeze squeeze expand
    contiguous clone slice narrow select split split_with_sizes chunk unbind sum movedim float double half bfloat16
    index index_select gather repeat_interleave expand_as view_as roll flip detach alias repeat type_as swapaxes
    unsafe_split unsafe_chunk swapdims moveaxis T mT adjoint _to_copy
    """)

#: Ops that add or lay side by side: of partial sums and zeros they make a partial sum.
ADDING = _named("""
    add add_ sub sub_ cat concat concatenate stack copy_ index_add index_add_ index_put index_put_ scatter scatter_
    scatter_add scatter_add_ index_copy index_copy_ slice_scatter select_scatter where
    """)

#: Ops whose result is another view of the same memory.
VIEWS = _named("""
    view reshape slice select narrow transpose permute t unsqueeze squeeze expand unbind split chunk alias flatten
    split_with_sizes unflatten movedim detach view_as expand_as diagonal unfold swapaxes
    """)

#: Ops that read no value of their operands, only shapes and dtypes.
SHAPED = _named("""
    new_empty new_zeros new_ones new_full zeros_like ones_like empty_like full_like rand_like randn_like
    """)

__all__ = ["ADDING", "HOMOGENEOUS", "SHAPED", "TABLE", "VIEWS", "Contraction", "Literal", "Rule", "Walk"]
