"""Convolutions: channels are contracted, groups are independent, space and kernel are needed whole."""

from __future__ import annotations

from collections.abc import Callable

from autoshard.ir import Op
from autoshard.passes.factors import Factor, product
from autoshard.passes.rules.matmul import contract
from autoshard.passes.rules.shape import unsupported
from autoshard.passes.rules.walk import Dims, Result, Rule, Walk, shape_of

Channels = Callable[[Factor, Dims], Factor]


def conv(op: Op, walk: Walk) -> Result:
    """``(n, groups x i, ...) * (groups x o, i, ...) -> (n, groups x o, ...)``."""
    groups = Factor(int(op.arguments.get("groups", 1)))

    def channels(x: Factor, weight: Dims) -> Factor:
        walk.unify(x, product([groups, weight[1]]))
        walk.unify(weight[0], product([groups, Factor(weight[0].size // groups.size)]))
        contract(op, walk, weight[1])
        return weight[0]

    return _convolved(op, walk, groups, channels)


def transposed(op: Op, walk: Walk) -> Result:
    """``(n, groups x i, ...) * (groups x i, o, ...) -> (n, groups x o, ...)``."""
    groups = Factor(int(op.arguments.get("groups", 1)))

    def channels(x: Factor, weight: Dims) -> Factor:
        inner = Factor(weight[0].size // groups.size)
        walk.unify(weight[0], product([groups, inner]))
        walk.unify(x, weight[0])
        contract(op, walk, inner)
        return product([groups, weight[1]])

    return _convolved(op, walk, groups, channels)


def general(op: Op, walk: Walk) -> Result:
    """The op that all convolutions come down to."""
    return (transposed if op.arguments["transposed"] else conv)(op, walk)


def _convolved(op: Op, walk: Walk, groups: Factor, channels: Channels) -> Result:
    x, weight, bias = (walk.dims(op.arguments.get(name)) for name in ("input", "weight", "bias"))
    batch = x[: len(x) - len(weight) + 1]
    if len(weight) < 3 or len(batch) > 1:
        return unsupported(op, walk)
    walk.literal("groups", groups)
    out = channels(x[len(batch)], weight)
    if bias:
        walk.unify(bias[0], out)
    for kernel in weight[2:]:
        walk.block(kernel, "it is the kernel of a convolution")
    spaces = walk.around(x[len(batch) + 1 :], shape_of(op)[len(batch) + 1 :], "a convolution runs along it")
    return [*batch, out, *spaces]


RULES: dict[str, Rule] = {
    **dict.fromkeys(["aten.conv1d", "aten.conv2d", "aten.conv3d"], conv),
    **dict.fromkeys(["aten.conv_transpose1d", "aten.conv_transpose2d", "aten.conv_transpose3d"], transposed),
    "aten.convolution": general,
}
