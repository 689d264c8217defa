"""Ops that take parts of dims and join them: a slice refines a dim into parts, ``cat`` lays parts end to end."""

from __future__ import annotations

from autoshard.ir import Op, Ref, references
from autoshard.passes.factors import Factor, concatenation, product
from autoshard.passes.rules.shape import unsupported
from autoshard.passes.rules.walk import Dims, Result, Rule, Walk, dim_of, shape_of
from autoshard.passes.unify import take

_DIAGONAL = "a diagonal follows its index"


def slice_(op: Op, walk: Walk) -> Result:
    """A range of one dim: refines it into parts. A stride leaves the coarse index."""
    dims, shape = walk.dims(op.arguments["self"]), shape_of(op)
    dim = dim_of(op, "dim", len(dims))
    size, step = dims[dim].size, int(op.arguments.get("step") or 1)
    start, end, _ = slice(op.arguments.get("start"), op.arguments.get("end"), 1).indices(size)
    if step == 1:
        dims[dim] = _part(walk, dims[dim], start, max(start, end))
    elif size % step == 0 and start < step and end == size:
        major, minor = Factor(size // step), Factor(step)
        walk.unify(dims[dim], product([major, minor]))
        walk.block(minor, "a strided slice picks among it")
        dims[dim] = major
    else:
        dims[dim] = walk.around([dims[dim]], [shape[dim]], "a strided slice")[0]
    return dims


def _part(walk: Walk, whole: Factor, start: int, end: int) -> Factor:
    """Return a range of a dim. Its ends are numbers in the code, which must follow a cut of what lies before them."""
    part = take(whole, start, end, walk.reason("a slice"))
    if end - start < whole.size:
        walk.literal("start", take(whole, 0, start, walk.reason("a slice")), whole)
        walk.literal("end", take(whole, 0, end, walk.reason("a slice")), whole)
    return part


def narrow(op: Op, walk: Walk) -> Result:
    """``length`` elements of one dim."""
    dims = walk.dims(op.arguments["self"])
    dim = dim_of(op, "dim", len(dims))
    start = int(op.arguments["start"]) % max(dims[dim].size, 1)
    dims[dim] = _part(walk, dims[dim], start, start + int(op.arguments["length"]))
    walk.literal("length", dims[dim])
    return dims


def slice_scatter(op: Op, walk: Walk) -> Result:
    """A copy with a range of one dim replaced."""
    dims, source = walk.dims(op.arguments["self"]), walk.dims(op.arguments["src"])
    into = slice_(op, walk) if int(op.arguments.get("step") or 1) == 1 else None
    if not isinstance(into, list):
        return unsupported(op, walk)
    for a, b in zip(into, source, strict=True):
        walk.unify(a, b)
    return dims


def select_scatter(op: Op, walk: Walk) -> Result:
    """A copy with one index of a dim replaced."""
    dims, source = walk.dims(op.arguments["self"]), walk.dims(op.arguments["src"])
    dim = dim_of(op, "dim", len(dims))
    walk.block(dims[dim], "an index picks one of it")
    for a, b in zip(dims[:dim] + dims[dim + 1 :], source, strict=True):
        walk.unify(a, b)
    return dims


def diagonal(op: Op, walk: Walk) -> Result:
    """The elements of two dims with one number, as a last dim."""
    dims = walk.dims(op.arguments["self"])
    pair = {dim_of(op, "dim1", len(dims), 0), dim_of(op, "dim2", len(dims), 1)}
    walk.blocked([dims[i] for i in pair], _DIAGONAL)
    rest = [d for i, d in enumerate(dims) if i not in pair]
    return rest + walk.blocked([Factor(shape_of(op)[-1])], _DIAGONAL)


def diag_embed(op: Op, walk: Walk) -> Result:
    """The last dim laid out as a diagonal of two."""
    dims = walk.dims(op.arguments["self"])
    rank = len(dims) + 1
    pair = sorted((dim_of(op, "dim1", rank, rank - 2), dim_of(op, "dim2", rank, rank - 1)))
    out = dims[:-1]
    made = walk.around([dims[-1], Factor(1)], [shape_of(op)[i] for i in pair], _DIAGONAL)
    for dim, new in zip(pair, made, strict=True):
        out.insert(dim, new)
    return out


def select(op: Op, walk: Walk) -> Result:
    """One index of a dim, which drops out."""
    dims = walk.dims(op.arguments["self"])
    dim = dim_of(op, "dim", len(dims))
    walk.block(dims[dim], "an index picks one of it")
    return dims[:dim] + dims[dim + 1 :]


def unbind(op: Op, walk: Walk) -> Result:
    """Every index of a dim, one tensor each."""
    dims = walk.dims(op.arguments["self"])
    dim = dim_of(op, "dim", len(dims))
    walk.block(dims[dim], "unbind takes it apart")
    count = len(op.result) if isinstance(op.result, tuple) else 0
    return [dims[:dim] + dims[dim + 1 :] for _ in range(count)]


def split(op: Op, walk: Walk) -> Result:
    """Consecutive pieces of one dim: refines it into parts."""
    dims = walk.dims(op.arguments["self"])
    dim = dim_of(op, "dim", len(dims))
    pieces: list[Dims | None] = []
    offset = 0
    for meta in op.result if isinstance(op.result, tuple) else ():
        piece = list(dims)
        length = meta.shape[dim] if meta else 0
        piece[dim] = take(dims[dim], offset, offset + length, walk.reason("a split"))
        offset += length
        pieces.append(piece)
    return pieces


def cat(op: Op, walk: Walk) -> Result:
    """Join tensors along one dim: its factor is the concatenation of theirs."""
    operands = [walk.dims(Ref(name)) for name in references(op.arguments["tensors"])]
    # torch skips legacy empty vectors whatever the rank of the others
    operands = [d for d in operands if not (len(d) == 1 and d[0].size == 0)] or operands[:1]
    dim = dim_of(op, "dim", len(operands[0]))
    if op.target == "aten.hstack":
        dim = min(1, len(operands[0]) - 1)
    out = list(operands[0])
    for dims in operands[1:]:
        for i, extent in enumerate(dims):
            if i != dim:
                walk.unify(out[i], extent)
    out[dim] = concatenation([dims[dim] for dims in operands])
    return out


def stack(op: Op, walk: Walk) -> Result:
    """Join tensors along a new dim, which numbers them."""
    operands = [walk.dims(Ref(name)) for name in references(op.arguments["tensors"])]
    out = list(operands[0])
    for dims in operands[1:]:
        for a, b in zip(out, dims, strict=True):
            walk.unify(a, b)
    number = Factor(len(operands))
    walk.block(number, "stack numbers its parts")
    out.insert(dim_of(op, "dim", len(out) + 1), number)
    return out


def _named(names: str, rule: Rule) -> dict[str, Rule]:
    return {f"aten.{name}": rule for name in names.split()}


RULES: dict[str, Rule] = {
    **_named("slice", slice_),
    **_named("narrow", narrow),
    **_named("select", select),
    **_named("unbind", unbind),
    **_named("split split_with_sizes chunk tensor_split unsafe_split unsafe_chunk", split),
    **_named("cat concat concatenate hstack", cat),
    **_named("stack", stack),
    **_named("slice_scatter", slice_scatter),
    **_named("select_scatter", select_scatter),
    **_named("diagonal", diagonal),
    **_named("diag_embed", diag_embed),
}
