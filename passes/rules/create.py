"""Tensors made in the forward: new extents, blocked where the values follow the index."""

from __future__ import annotations

from autoshard.ir import Meta, Op, Ref, references
from autoshard.passes.rules.shape import unsupported
from autoshard.passes.rules.walk import Result, Rule, Walk


def constant(op: Op, walk: Walk) -> Result:
    """Every element alike (or random): a shorter tensor is a slice of the longer one."""
    return walk.fresh(op.result if isinstance(op.result, Meta) else None)


def indexed(op: Op, walk: Walk) -> Result:
    """Values follow the index: a shorter tensor would be another one, not a slice."""
    dims = walk.fresh(op.result if isinstance(op.result, Meta) else None)
    for dim in dims:
        walk.block(dim, f"{op.target.split('.')[-1]} numbers it from zero")
    return dims


_CONSTANT = "zeros ones full empty new_ones new_zeros new_full new_empty rand randn randint scalar_tensor".split()
_INDEXED = """
arange eye linspace logspace tril_indices triu_indices hann_window hamming_window blackman_window kaiser_window
fft_fftfreq fft_rfftfreq randperm
""".split()


def triangle(op: Op, walk: Walk) -> Result:
    """Keeps a triangle of the last two dims, by index."""
    dims = walk.dims(op.arguments["self"])
    for dim in dims[-2:]:
        walk.block(dim, "a triangle follows its index")
    return dims


def one_hot(op: Op, walk: Walk) -> Result:
    """A new dim that numbers classes."""
    classes = walk.fresh(op.result if isinstance(op.result, Meta) else None)[-1]
    walk.block(classes, "one_hot numbers it")
    return [*walk.dims(op.arguments["self"]), classes]


def counted(op: Op, walk: Walk) -> Result:
    """Counts of elements by value: all of them are needed."""
    return unsupported(op, walk, "it counts elements by value")


def mesh(op: Op, walk: Walk) -> Result:
    """One tensor for each operand, all of the shape that the operands span."""
    spans = [dim for name in references(op.arguments) for dim in walk.dims(Ref(name))]
    if op.arguments.get("indexing") == "xy":
        spans[:2] = spans[1::-1]
    return [list(spans) for _ in spans]


RULES: dict[str, Rule] = {
    **{f"aten.{name}": constant for name in _CONSTANT},
    **{f"aten.{name}": indexed for name in _INDEXED},
    **dict.fromkeys(["aten.tril", "aten.triu", "aten.tril_", "aten.triu_"], triangle),
    "aten.one_hot": one_hot,
    **dict.fromkeys(["aten.histc", "aten.bincount"], counted),
    "aten.meshgrid": mesh,
}
