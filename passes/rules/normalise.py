"""Normalisations: the normalised dims are needed whole, their weights follow the input."""

from __future__ import annotations

from autoshard.ir import Op
from autoshard.passes.factors import Factor, product
from autoshard.passes.rules.walk import Result, Rule, Walk


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
    dims, groups = walk.dims(op.arguments["input"]), int(op.arguments["num_groups"])
    inner = Factor(dims[1].size // groups)
    walk.unify(dims[1], product([Factor(groups), inner]))
    # the op takes the number of groups as a literal, which no rank-local call would know
    walk.block(dims[1], "group_norm has its number of groups as a literal")
    for dim in dims[2:]:
        walk.block(dim, "a norm needs it whole")
    for name in ("weight", "bias"):
        weight = walk.dims(op.arguments.get(name))
        if weight:
            walk.unify(weight[0], dims[1])
    return dims


RULES: dict[str, Rule] = {
    "aten.layer_norm": layer_norm,
    "aten.rms_norm": layer_norm,
    "aten.batch_norm": batch_norm,
    "aten.group_norm": group_norm,
}
