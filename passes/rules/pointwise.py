"""Ops that work on each element alone: right-aligned dims are the same."""

from __future__ import annotations

from autoshard.ir import Op, Ref, references
from autoshard.passes.rules.walk import Result, Rule, Walk, shape_of

NAMES = """
abs acos acosh add addcdiv addcmul alias alpha_dropout angle arctan2 asin asinh atan atan2 atanh bernoulli bitwise_and
bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift bitwise_xor ceil celu clamp clamp_max clamp_min clip clone
complex conj conj_physical contiguous copy copy_ copysign cos cosh deg2rad detach digamma div divide dropout elu
empty_like eq erf erfc erfinv exp exp2 expand_as expm1 exponential fake_quantize_per_tensor_affine feature_dropout fill
fix float_power floor floor_divide fmax fmin fmod frac full_like ge gelu greater greater_equal gt hardshrink hardsigmoid
hardswish hardtanh heaviside hypot i0 imag isclose isfinite isinf isnan ldexp le leaky_relu lerp less less_equal lgamma
lift_fresh lift_fresh_copy log log10 log1p log2 log_sigmoid logaddexp logaddexp2 logical_and logical_not logical_or
logical_xor logit lt masked_fill maximum minimum mish mul multiply nan_to_num native_dropout ne neg negative nextafter
normal not_equal ones_like polar positive pow rad2deg rand_like randint_like randn_like real reciprocal relu relu6
remainder resolve_conj resolve_neg round rrelu rsqrt rsub selu sgn sigmoid sign signbit silu sin sinc sinh softplus
softshrink sqrt square sub subtract tan tanh threshold to true_divide trunc uniform where xlogy zero zeros_like _to_copy
__and__ __or__ __xor__ __invert__ __lshift__ __rshift__ float double half bfloat16
""".split()


def pointwise(op: Op, walk: Walk) -> Result:
    """Unify the dims of every tensor operand, right-aligned."""
    operands = [walk.dims(Ref(name)) for name in references(op.arguments)]
    if isinstance(op.result, tuple):  # a dropout and its mask
        return [walk.broadcast(meta.shape, operands) if meta else None for meta in op.result]
    return walk.broadcast(shape_of(op), operands)


def alone(op: Op, walk: Walk) -> Result:
    """The first operand's dims: others lend no more than their type."""
    return walk.dims(op.arguments["self"])


def by_table(op: Op, walk: Walk) -> Result:
    """Each element against a sorted row of values, or a set of them, which is needed whole."""
    elements, table = {"aten.bucketize": ("self", "boundaries"), "aten.searchsorted": ("self", "sorted_sequence")}.get(
        op.target, ("elements", "test_elements")
    )
    dims, values = walk.dims(op.arguments[elements]), walk.dims(op.arguments[table])
    rows = values[:-1] if op.target == "aten.searchsorted" else []
    walk.blocked(values[len(rows) :], "elements are looked up in it")
    for a, b in zip(dims, rows, strict=False):
        walk.unify(a, b)
    return dims


def prelu(op: Op, walk: Walk) -> Result:
    """A slope for each channel."""
    dims, slopes = walk.dims(op.arguments["self"]), walk.dims(op.arguments["weight"])
    if slopes and slopes[0].size > 1:
        walk.unify(slopes[0], dims[min(1, len(dims) - 1)])
    return dims


RULES: dict[str, Rule] = {f"aten.{name}": pointwise for name in NAMES}
RULES |= {f"aten.{name}_": pointwise for name in NAMES if not name.endswith("_")}
RULES |= {
    "aten.type_as": alone,
    "aten.prelu": prelu,
    **dict.fromkeys(["aten.bucketize", "aten.searchsorted", "aten.isin"], by_table),
}
