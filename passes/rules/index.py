"""Picking and writing by index: the indexed dim is needed whole, the others pass."""

from __future__ import annotations

from autoshard.ir import Op, Ref, references
from autoshard.passes.factors import Factor
from autoshard.passes.rules.shape import unsupported
from autoshard.passes.rules.walk import Dims, Result, Rule, Walk, dim_of


def index(op: Op, walk: Walk) -> Result:
    """``x[i, :, j]`` with integer tensors: indexed dims give way to the indices' own dims."""
    dims = walk.dims(op.arguments["self"])
    indices = list(op.arguments["indices"])
    places = [i for i, item in enumerate(indices) if isinstance(item, Ref)]
    if any((meta := walk.meta(indices[i])) is None or meta.dtype == "bool" for i in places):
        return unsupported(op, walk)
    operands = [walk.dims(indices[i]) for i in places]
    rank = max(len(d) for d in operands)
    shape = [max((d[-b].size for d in operands if b <= len(d)), default=1) for b in range(rank, 0, -1)]
    picked = walk.broadcast(shape, operands)
    for i in places:
        walk.block(dims[i], "an index picks among it")
    together = places == list(range(places[0], places[0] + len(places)))
    before = [d for i, d in enumerate(dims) if i not in places and i < places[0]]
    after = [d for i, d in enumerate(dims) if i not in places and i > places[0]]
    return before + picked + after if together else picked + before + after


def index_select(op: Op, walk: Walk) -> Result:
    """One dim picked by a vector of numbers."""
    dims = walk.dims(op.arguments["self"])
    dim = dim_of(op, "dim", len(dims))
    walk.block(dims[dim], "an index picks among it")
    dims[dim] = walk.dims(op.arguments["index"])[0]
    return dims


def gather(op: Op, walk: Walk) -> Result:
    """Along one dim by index; other dims of equal extent are the same."""
    dims, picked = walk.dims(op.arguments["self"]), walk.dims(op.arguments["index"])
    _same_but(walk, dims, picked, dim_of(op, "dim", len(dims)), "gather picks along it")
    return picked


def scatter(op: Op, walk: Walk) -> Result:
    """Writes along one dim by index; other dims of equal extent are the same."""
    dims = walk.dims(op.arguments["self"])
    dim = dim_of(op, "dim", len(dims))
    walk.block(dims[dim], "scatter writes along it")
    for name in references({k: v for k, v in op.arguments.items() if k != "self"}):
        _same_but(walk, dims, walk.dims(Ref(name)), dim, "scatter writes along it")
    return dims


def index_add(op: Op, walk: Walk) -> Result:
    """Adds rows at given numbers; the other dims are the same."""
    dims, source = walk.dims(op.arguments["self"]), walk.dims(op.arguments["source"])
    dim = dim_of(op, "dim", len(dims))
    walk.block(dims[dim], "index_add writes along it")
    walk.block(source[dim], "index_add writes along it")
    for extent in walk.dims(op.arguments["index"]):
        walk.block(extent, "index_add writes along it")
    for i in range(len(dims)):
        if i != dim:
            walk.unify(dims[i], source[i])
    return dims


def _same_but(walk: Walk, dims: Dims, other: Dims, dim: int, why: str) -> None:
    for i, (a, b) in enumerate(zip(dims, other, strict=False)):
        if i == dim:
            walk.block(a, why)
            walk.block(b, why)
        elif a.size == b.size:
            walk.unify(a, b)
        else:
            walk.block(a, why)
            walk.block(b, why)


def complex_view(op: Op, walk: Walk) -> Result:
    """Pairs of real numbers are one complex number, and back."""
    dims = walk.dims(op.arguments["self"])
    if op.target == "aten.view_as_real":
        pair = Factor(2)
        walk.block(pair, "it holds the two halves of a complex number")
        return [*dims, pair]
    walk.block(dims[-1], "it holds the two halves of a complex number")
    return dims[:-1]


RULES: dict[str, Rule] = {
    "aten.index": index,
    "aten.index_select": index_select,
    "aten.gather": gather,
    **dict.fromkeys(["aten.scatter", "aten.scatter_", "aten.scatter_add", "aten.scatter_add_"], scatter),
    **dict.fromkeys(["aten.index_add", "aten.index_add_"], index_add),
    **dict.fromkeys(["aten.view_as_real", "aten.view_as_complex"], complex_view),
}
