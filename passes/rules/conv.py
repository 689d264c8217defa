"""Convolutions: channels are contracted, space and kernel are needed whole."""

from __future__ import annotations

from autoshard.ir import Op
from autoshard.passes.factors import Factor, product
from autoshard.passes.rules.shape import unsupported
from autoshard.passes.rules.walk import Result, Rule, Walk, shape_of


def conv(op: Op, walk: Walk) -> Result:
    """``(n, i, ...) * (o, i / groups, ...) -> (n, o, ...)``; depthwise channels pass through."""
    x, weight, bias = (walk.dims(op.arguments.get(name)) for name in ("input", "weight", "bias"))
    groups, shape = int(op.arguments.get("groups", 1)), shape_of(op)
    if len(x) != len(weight):
        return unsupported(op, walk)
    if groups == 1:
        walk.unify(x[1], weight[1])
        walk.contract(weight[1], "matmul")
    else:
        walk.unify(x[1], product([Factor(groups), weight[1]]))
        walk.unify(weight[0], product([Factor(groups), Factor(weight[0].size // groups)]))
        walk.block(weight[0], "the convolution has its number of groups as a literal")
        walk.block(x[1], "the convolution has its number of groups as a literal")
    if bias:
        walk.unify(bias[0], weight[0])
    out = [x[0], weight[0]]
    for space, kernel, size in zip(x[2:], weight[2:], shape[2:], strict=True):
        walk.block(kernel, "it is the kernel of a convolution")
        walk.block(space, "a convolution runs along it")
        out.append(space if space.size == size else Factor(size))
        walk.block(out[-1], "a convolution runs along it")
    return out


RULES: dict[str, Rule] = dict.fromkeys(["aten.conv1d", "aten.conv2d", "aten.conv3d"], conv)
