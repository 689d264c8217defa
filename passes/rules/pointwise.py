"""Ops that work on each element alone: right-aligned dims are the same."""

from __future__ import annotations

from autoshard.ir import Op, Ref, references
from autoshard.passes.rules.walk import Result, Rule, Walk, shape_of

NAMES = """
abs acos add addcdiv addcmul alias angle atan atan2 bernoulli bitwise_and bitwise_not bitwise_or bitwise_xor
ceil celu clamp clamp_max clamp_min clip clone complex conj contiguous copy copy_ cos cosh detach div divide
dropout elu empty_like eq erf exp exp2 expand_as expm1 feature_dropout fill floor floor_divide fmod full_like
ge gelu gt hardsigmoid hardswish hardtanh imag isfinite isinf isnan le leaky_relu lerp lift_fresh
lift_fresh_copy log log1p log2 log_sigmoid logaddexp logical_and logical_not logical_or logical_xor logit lt
masked_fill maximum minimum mish mul multiply nan_to_num native_dropout ne neg ones_like polar positive pow
rand_like randn_like real reciprocal relu relu6 remainder round rsqrt rsub selu sigmoid sign silu sin sinh
softplus sqrt square sub subtract tan tanh threshold to true_divide trunc type_as where xlogy zero zeros_like
_to_copy __and__ __or__ __xor__ __invert__ float double half bfloat16
""".split()


def pointwise(op: Op, walk: Walk) -> Result:
    """Unify the dims of every tensor operand, right-aligned."""
    return walk.broadcast(shape_of(op), [walk.dims(Ref(name)) for name in references(op.arguments)])


RULES: dict[str, Rule] = {f"aten.{name}": pointwise for name in NAMES}
RULES |= {f"aten.{name}_": pointwise for name in NAMES if not name.endswith("_")}
