"""Ops that move, split and join dims without touching values."""

from __future__ import annotations

from autoshard.ir import Meta, Op, Ref, references
from autoshard.passes.factors import Factor, concatenation, product
from autoshard.passes.rules.walk import Dims, Result, Rule, Walk, dim_of, shape_of
from autoshard.passes.unify import reshape, take


def view(op: Op, walk: Walk) -> Result:
    """Regroup factors major to minor."""
    if op.overload == "dtype":
        return _same_sizes(op, walk)
    return reshape(walk.dims(op.arguments["self"]), shape_of(op), walk.reason("a view across factors"))


def _same_sizes(op: Op, walk: Walk) -> Result:
    dims = walk.dims(op.arguments["self"])
    return [d if d.size == s else Factor(s) for d, s in zip(dims, shape_of(op), strict=True)]


def permute(op: Op, walk: Walk) -> Result:
    """Reorder dims."""
    dims = walk.dims(op.arguments["self"])
    return [dims[int(i)] for i in op.arguments["dims"]]


def transpose(op: Op, walk: Walk) -> Result:
    """Swap two dims; without arguments, the last two."""
    dims = walk.dims(op.arguments["self"])
    names = [n for n in op.arguments if n != "self"]
    if len(dims) < 2:
        return dims
    i, j = (dim_of(op, n, len(dims)) for n in names) if len(names) == 2 else (len(dims) - 2, len(dims) - 1)
    dims[i], dims[j] = dims[j], dims[i]
    return dims


def movedim(op: Op, walk: Walk) -> Result:
    """Move dims to new places, the others keep their order."""
    dims = walk.dims(op.arguments["self"])
    source, target = op.arguments["source"], op.arguments["destination"]
    source = [source] if isinstance(source, int) else source
    target = [target] if isinstance(target, int) else target
    places = {int(t) % len(dims): int(s) % len(dims) for s, t in zip(source, target, strict=True)}
    rest = [d for i, d in enumerate(dims) if i not in places.values()]
    return [dims[places[i]] if i in places else rest.pop(0) for i in range(len(dims))]


def unsqueeze(op: Op, walk: Walk) -> Result:
    """Add a dim of 1."""
    dims = walk.dims(op.arguments["self"])
    dims.insert(dim_of(op, "dim", len(dims) + 1), Factor(1))
    return dims


def squeeze(op: Op, walk: Walk) -> Result:
    """Drop dims of 1."""
    dims = walk.dims(op.arguments["self"])
    given = op.arguments.get("dim")
    picked = range(len(dims)) if given is None else [given] if isinstance(given, int) else given
    drop = {int(i) % max(len(dims), 1) for i in picked}
    return [d for i, d in enumerate(dims) if not (i in drop and d.size == 1)]


def expand(op: Op, walk: Walk) -> Result:
    """Repeat dims of 1: the repeated extent is new."""
    dims, shape = walk.dims(op.arguments["self"]), shape_of(op)
    lead = len(shape) - len(dims)
    return [dims[i - lead] if i >= lead and dims[i - lead].size == s else Factor(s) for i, s in enumerate(shape)]


def repeat(op: Op, walk: Walk) -> Result:
    """Tile a tensor: each dim becomes copies x dim."""
    dims = walk.dims(op.arguments["self"])
    counts = [int(c) for c in op.arguments.get("repeats", op.arguments.get("dims"))]
    dims = [Factor(1)] * (len(counts) - len(dims)) + dims
    counts = [1] * (len(dims) - len(counts)) + counts
    return [d if c == 1 else product([Factor(c), d]) for c, d in zip(counts, dims, strict=True)]


def repeat_interleave(op: Op, walk: Walk) -> Result:
    """Repeat each element: dim x copies."""
    dims, repeats, dim = walk.dims(op.arguments["self"]), op.arguments.get("repeats"), op.arguments.get("dim")
    if not isinstance(repeats, int) or dim is None:
        return unsupported(op, walk)
    dims[dim % len(dims)] = product([dims[dim % len(dims)], Factor(repeats)])
    return dims


def unsupported(op: Op, walk: Walk) -> Result:
    """Block everything the op touches."""
    why = f"no rule for {op.target} called like this"
    for name in references(op.arguments):
        for dim in walk.dims(Ref(name)):
            walk.block(dim, why)
    if isinstance(op.result, tuple):
        return [_blocked(m, walk, why) for m in op.result]
    return _blocked(op.result, walk, why)


def _blocked(meta: Meta | None, walk: Walk, why: str) -> Dims:
    dims = walk.fresh(meta)
    for dim in dims:
        walk.block(dim, why)
    return dims


def slice_(op: Op, walk: Walk) -> Result:
    """A range of one dim: refines it into parts. A stride leaves the coarse index."""
    dims, shape = walk.dims(op.arguments["self"]), shape_of(op)
    dim = dim_of(op, "dim", len(dims))
    size, step = dims[dim].size, int(op.arguments.get("step") or 1)
    start, end, _ = slice(op.arguments.get("start"), op.arguments.get("end"), 1).indices(size)
    if step == 1:
        dims[dim] = take(dims[dim], start, end, walk.reason("a slice"))
    elif size % step == 0 and start < step and end == size:
        major, minor = Factor(size // step), Factor(step)
        walk.unify(dims[dim], product([major, minor]))
        walk.block(minor, "a strided slice picks among it")
        dims[dim] = major
    else:
        walk.block(dims[dim], "a strided slice")
        dims[dim] = Factor(shape[dim])
        walk.block(dims[dim], "a strided slice")
    return dims


def narrow(op: Op, walk: Walk) -> Result:
    """``length`` elements of one dim."""
    dims = walk.dims(op.arguments["self"])
    dim = dim_of(op, "dim", len(dims))
    start = int(op.arguments["start"]) % dims[dim].size
    dims[dim] = take(dims[dim], start, start + int(op.arguments["length"]), walk.reason("a slice"))
    return dims


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


def blocking(why: str, name: str = "dims") -> Rule:
    """Return a rule that keeps the shape and blocks the dims an argument names."""

    def rule(op: Op, walk: Walk) -> Result:
        dims, shape = walk.dims(op.arguments["self"]), shape_of(op)
        given = op.arguments.get(name, op.arguments.get("dim"))
        picked = range(len(dims)) if given is None or given == () else [given] if isinstance(given, int) else given
        for i in picked:
            walk.block(dims[int(i) % len(dims)], why)
        return [d if d.size == s else Factor(s) for d, s in zip(dims, shape, strict=True)]

    return rule


def pad(op: Op, walk: Walk) -> Result:
    """Padded dims are new and blocked, the others pass."""
    dims, shape = walk.dims(op.arguments["self"]), shape_of(op)
    amounts = op.arguments["pad"]
    for i in range(len(amounts) // 2):
        if amounts[2 * i] or amounts[2 * i + 1]:
            walk.block(dims[-1 - i], "padding")
            dims[-1 - i] = Factor(shape[-1 - i])
            walk.block(dims[-1 - i], "padding")
    return dims


RULES: dict[str, Rule] = {
    **dict.fromkeys(
        [
            "aten.view",
            "aten.reshape",
            "aten._unsafe_view",
            "aten.flatten",
            "aten.unflatten",
            "aten.view_as",
            "aten.reshape_as",
        ],
        view,
    ),
    "aten.permute": permute,
    **dict.fromkeys(
        ["aten.transpose", "aten.transpose_", "aten.swapaxes", "aten.swapdims", "aten.t", "aten.mT", "aten.numpy_T"],
        transpose,
    ),
    **dict.fromkeys(["aten.movedim", "aten.moveaxis"], movedim),
    "aten.unsqueeze": unsqueeze,
    "aten.unsqueeze_": unsqueeze,
    "aten.squeeze": squeeze,
    **dict.fromkeys(["aten.expand", "aten.broadcast_to"], expand),
    **dict.fromkeys(["aten.repeat", "aten.tile"], repeat),
    "aten.repeat_interleave": repeat_interleave,
    "aten.slice": slice_,
    "aten.narrow": narrow,
    "aten.select": select,
    "aten.unbind": unbind,
    **dict.fromkeys(["aten.split", "aten.split_with_sizes", "aten.chunk", "aten.tensor_split"], split),
    **dict.fromkeys(["aten.cat", "aten.concat", "aten.concatenate"], cat),
    "aten.stack": stack,
    "aten.roll": blocking("roll moves elements along it"),
    "aten.flip": blocking("flip reverses it"),
    **dict.fromkeys(["aten.pad", "aten.constant_pad_nd"], pad),
}
