"""Picking and writing by index: the indexed dim is needed whole, the others pass.

A list of numbers in the code is several slices: it refines its dim into parts.
"""

from __future__ import annotations

from autoshard.ir import Op, Ref, references
from autoshard.passes.factors import Factor, concatenation
from autoshard.passes.rules.shape import unsupported
from autoshard.passes.rules.walk import Dims, Result, Rule, Walk, dim_of
from autoshard.passes.unify import take

_LONG = 9
_PICKS, _WRITES = "an index picks among it", "an index writes along it"


def index(op: Op, walk: Walk) -> Result:
    """``x[i, :, j]`` with tensors: indexed dims give way to the indices' own dims."""
    indices = [item for item in op.arguments["indices"] if isinstance(item, Ref)]
    if any(meta.dtype == "bool" for item in indices if (meta := walk.meta(item)) is not None):
        return unsupported(op, walk, "a mask picks as many elements as are true")
    if len(indices) == 1 and len(walk.numbers.get(indices[0].name, range(_LONG))) < _LONG:
        return _listed(op, walk, walk.numbers[indices[0].name])
    found = _indexed(op, walk, _PICKS)
    return unsupported(op, walk) if found is None else [dim for part in found for dim in part]


def _listed(op: Op, walk: Walk, numbers: tuple[int, ...]) -> Dims:
    """``x[:, [3, -1]]``: the slices that it names, laid end to end."""
    dims = walk.dims(op.arguments["self"])
    place = next(i for i, item in enumerate(op.arguments["indices"]) if item is not None)
    whole = dims[place]
    walk.blocked(walk.dims(op.arguments["indices"][place]), _PICKS)
    picked: Dims = []
    for item, number in enumerate(n % whole.size for n in numbers):
        picked.append(take(whole, number, number + 1, walk.reason(_PICKS)))
        walk.literal("indices", take(whole, 0, number, walk.reason(_PICKS)), whole, item)
    dims[place] = concatenation(picked)
    return dims


def _indexed(op: Op, walk: Walk, why: str) -> tuple[Dims, Dims, Dims] | None:
    """Block what is indexed; return the dims of ``x[indices]``: those before the picked ones, picked, behind.

    A mask picks as many elements as are true: their extent is an unknown one, of 0. None for an index without dims.
    """
    dims = walk.dims(op.arguments["self"])
    spans: list[tuple[int, Dims]] = []
    kept: list[int] = []
    place = 0
    for item in op.arguments["indices"]:
        own, meta = walk.dims(item), walk.meta(item)
        if not isinstance(item, Ref):
            kept.append(place)
        elif not own or meta is None:
            return None
        else:
            spans.append((place, [Factor(0)] if meta.dtype == "bool" else own))
        wide = len(own) if meta is not None and meta.dtype == "bool" else 1
        if isinstance(item, Ref):
            walk.blocked(dims[place : place + wide], why)
            walk.blocked(own if wide > 1 or spans[-1][1] is not own else [], why)
        place += wide
    kept += range(place, len(dims))
    operands = [own for _, own in spans]
    rank = max(len(own) for own in operands)
    shape = [max((own[-b].size for own in operands if b <= len(own)), default=1) for b in range(rank, 0, -1)]
    first, final = spans[0][0], spans[-1][0]
    split = not any(first < i < final for i in kept)
    before = [dims[i] for i in kept if split and i < first]
    behind = [dims[i] for i in kept if not split or i > first]
    return before, walk.broadcast(shape, operands), behind


def index_put(op: Op, walk: Walk) -> Result:
    """``x[i, :, j] = values``: what is written by number is needed whole, the other dims are the values' own."""
    dims, values = walk.dims(op.arguments["self"]), walk.dims(op.arguments["values"])
    found = _indexed(op, walk, _WRITES)
    if found is None:
        return unsupported(op, walk)
    before, picked, behind = found
    walk.blocked(picked, _WRITES)
    target = [*before, *picked, *behind]
    for back in range(1, min(len(values), len(target)) + 1):
        if len(behind) < back <= len(behind) + len(picked):
            walk.block(values[-back], _WRITES)
        elif values[-back].size == target[-back].size:
            walk.unify(values[-back], target[-back])
    return dims


def index_select(op: Op, walk: Walk) -> Result:
    """One dim picked by a vector of numbers."""
    dims = walk.dims(op.arguments["self"])
    dim = dim_of(op, "dim", len(dims))
    walk.block(dims[dim], _PICKS)
    dims[dim] = walk.dims(op.arguments["index"])[0]
    return dims


def gather(op: Op, walk: Walk) -> Result:
    """Along one dim by index; other dims of equal extent are the same."""
    dims = walk.dims(op.arguments["self"])
    picked = walk.dims(op.arguments.get("index", op.arguments.get("indices")))
    if op.arguments.get("dim") is None or len(picked) != len(dims):
        return unsupported(op, walk)
    dim = dim_of(op, "dim", len(dims))
    walk.block(dims[dim], _PICKS)
    _same_but(walk, dims, picked, dim, _PICKS)
    return picked


def scatter(op: Op, walk: Walk) -> Result:
    """Writes along one dim by index; other dims of equal extent are the same."""
    dims = walk.dims(op.arguments["self"])
    dim = dim_of(op, "dim", len(dims))
    for name in references({k: v for k, v in op.arguments.items() if k != "self"}):
        other = walk.dims(Ref(name))
        if other:
            walk.blocked([dims[dim], other[dim]], _WRITES)
            _same_but(walk, dims, other, dim, _WRITES)
    return dims


def _same_but(walk: Walk, dims: Dims, other: Dims, dim: int, why: str) -> None:
    for i, (a, b) in enumerate(zip(dims, other, strict=True)):
        if i != dim and a.size == b.size:
            walk.unify(a, b)
        elif i != dim:
            walk.blocked([a, b], why)


def index_add(op: Op, walk: Walk) -> Result:
    """Writes rows, or a number, at given places of one dim; the other dims are the same."""
    dims, source = walk.dims(op.arguments["self"]), walk.dims(op.arguments.get("source"))
    dim = dim_of(op, "dim", len(dims))
    walk.blocked([dims[dim], *walk.dims(op.arguments["index"])], _WRITES)
    for i, (a, b) in enumerate(zip(dims, source, strict=bool(source))):
        if i == dim:
            walk.block(b, _WRITES)
        else:
            walk.unify(a, b)
    return dims


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
    **dict.fromkeys(["aten.index_put", "aten.index_put_"], index_put),
    "aten.index_select": index_select,
    **dict.fromkeys(["aten.gather", "aten.take_along_dim"], gather),
    **{f"aten.scatter{kind}{end}": scatter for kind in ("", "_add", "_reduce") for end in ("", "_")},
    **{f"aten.index_{kind}{end}": index_add for kind in ("add", "copy", "fill") for end in ("", "_")},
    **dict.fromkeys(["aten.view_as_real", "aten.view_as_complex"], complex_view),
}
