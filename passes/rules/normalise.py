"""Normalisations: the normalised dims are needed whole, their weights follow the input."""

from __future__ import annotations

from autoshard.ir import Op
from autoshard.passes.factors import Factor, product
from autoshard.passes.rules.walk import Result, Rule, Walk, dim_of, shape_of


def layer_norm(op: Op, walk: Walk) -> Result:
    """``layer_norm`` and ``rms_norm`` over the last dims."""
    dims = walk.dims(op.arguments["input"])
    for back in range(1, len(op.arguments["normalized_shape"]) + 1):
        walk.block(dims[-back], "a norm needs it whole")
        for name in ("weight", "bias"):
            weight = walk.dims(op.arguments.get(name))
            if weight:
                walk.unify(weight[-back], dims[-back])
    return dims


def batch_norm(op: Op, walk: Walk) -> Result:
    """Each channel alone; statistics run over batch and space, which are needed whole."""
    dims = walk.dims(op.arguments["input"])
    channels = dims[1] if len(dims) > 1 else dims[0]
    for name in ("weight", "bias", "running_mean", "running_var"):
        weight = walk.dims(op.arguments.get(name))
        if weight:
            walk.unify(weight[0], channels)
    for i, dim in enumerate(dims):
        if i != 1:
            walk.block(dim, "batch statistics need it whole")
    return dims


def group_norm(op: Op, walk: Walk) -> Result:
    """Groups of channels are independent; inside a group everything is needed whole."""
    dims = walk.dims(op.arguments["input"])
    groups = Factor(int(op.arguments["num_groups"]))
    inner = Factor(dims[1].size // groups.size)
    walk.unify(dims[1], product([groups, inner]))
    walk.literal("num_groups", groups)
    walk.blocked([inner, *dims[2:]], "a norm needs it whole")
    for name in ("weight", "bias"):
        weight = walk.dims(op.arguments.get(name))
        if weight:
            walk.unify(weight[0], dims[1])
    return dims


def weight_norm(op: Op, walk: Walk) -> Result:
    """A weight scaled to length along one dim: the others are needed whole."""
    dims, scale = walk.dims(op.arguments["v"]), walk.dims(op.arguments["g"])
    dim = dim_of(op, "dim", len(dims))
    walk.blocked([d for i, d in enumerate(dims) if i != dim], "a norm needs it whole")
    if len(scale) == len(dims):
        walk.unify(scale[dim], dims[dim])
    return [dims, scale] if isinstance(op.result, tuple) else dims


def similarity(op: Op, walk: Walk) -> Result:
    """The cosine along one dim."""
    a, b = walk.dims(op.arguments["x1"]), walk.dims(op.arguments["x2"])
    dim = dim_of(op, "dim", max(len(a), len(b)), 1) - max(len(a), len(b))
    walk.blocked([a[dim], b[dim]], "a norm needs it whole")
    own = [dims[:dim] + (dims[dim + 1 :] if dim != -1 else []) for dims in (a, b)]
    return walk.broadcast(shape_of(op), own)


RULES: dict[str, Rule] = {
    "aten.layer_norm": layer_norm,
    "aten.rms_norm": layer_norm,
    "aten.batch_norm": batch_norm,
    "aten.instance_norm": batch_norm,
    "aten.group_norm": group_norm,
    **dict.fromkeys(["aten._weight_norm", "aten._weight_norm_interface"], weight_norm),
    "aten.cosine_similarity": similarity,
}
