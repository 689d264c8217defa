"""Ops that regroup, move and repeat dims without touching values."""

from __future__ import annotations

from autoshard.ir import Op, Ref, references
from autoshard.passes.factors import Factor, product
from autoshard.passes.rules.walk import Result, Rule, Walk, dim_of, shape_of
from autoshard.passes.unify import reshape


def view(op: Op, walk: Walk) -> Result:
    """Regroup factors major to minor."""
    if op.overload == "dtype":
        dims = walk.dims(op.arguments["self"])
        return dims[:-1] + walk.around(dims[-1:], shape_of(op)[-1:], "its elements are read as others")
    return reshape(walk.dims(op.arguments["self"]), shape_of(op), walk.reason("a view across factors"))


def permute(op: Op, walk: Walk) -> Result:
    """Reorder dims."""
    dims = walk.dims(op.arguments["self"])
    return [dims[int(i)] for i in op.arguments["dims"]]


def transpose(op: Op, walk: Walk) -> Result:
    """Swap two dims; without arguments, the last two, or all of them end for end."""
    dims = walk.dims(op.arguments["self"])
    if op.target == "aten.numpy_T":
        return dims[::-1]
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
    """Repeat each element: dim x copies; with a number for each element, the dim is needed whole."""
    dims, repeats, dim = walk.dims(op.arguments["self"]), op.arguments.get("repeats"), op.arguments.get("dim")
    if not dims:
        return unsupported(op, walk)
    if dim is None:
        dims, dim = [product(dims)], 0
    dim = int(dim) % len(dims)
    if isinstance(repeats, int):
        copies = Factor(repeats)
        walk.literal("repeats", copies)
        dims[dim] = product([dims[dim], copies])
    else:
        walk.blocked(walk.dims(repeats), "each element has a number of copies")
        dims[dim] = walk.around([dims[dim]], [shape_of(op)[dim]], "each element has a number of copies")[0]
    return dims


def unsupported(op: Op, walk: Walk, why: str = "") -> Result:
    """Block everything the op touches."""
    why = why or f"no rule for {op.target} called like this"
    for name in references(op.arguments):
        walk.blocked(walk.dims(Ref(name)), why)
    if isinstance(op.result, tuple):
        return [walk.blocked(walk.fresh(meta), why) for meta in op.result]
    return walk.blocked(walk.fresh(op.result), why)


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


RULES: dict[str, Rule] = {
    **{f"aten.{n}": view for n in "view reshape _unsafe_view flatten unflatten view_as reshape_as".split()},
    "aten.permute": permute,
    **{f"aten.{n}": transpose for n in "transpose transpose_ swapaxes swapdims t mT adjoint numpy_T".split()},
    **{f"aten.{n}": movedim for n in "movedim moveaxis".split()},
    **{f"aten.{n}": unsqueeze for n in "unsqueeze unsqueeze_".split()},
    **{f"aten.{n}": squeeze for n in "squeeze squeeze_".split()},
    **{f"aten.{n}": expand for n in "expand broadcast_to".split()},
    **{f"aten.{n}": repeat for n in "repeat tile".split()},
    "aten.repeat_interleave": repeat_interleave,
    "aten.roll": blocking("roll moves elements along it"),
    "aten.flip": blocking("flip reverses it"),
}
