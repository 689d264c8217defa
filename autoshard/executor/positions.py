"""Which functions of torch work element by element, and which give one number whatever the order of elements."""

from __future__ import annotations

import re
from typing import Any

_DESCRIPTORS = {"__get__": "get", "__set__": "set", "__delete__": "delete"}
_KERNEL = re.compile(r"^_(foreach|fused|amp_foreach)_(.+)$")
_OPERATOR = re.compile(r"^__[ir]?(\w+?)__$")

#: Of tensors cut alike, the answer has the same cut; trailing underscores and ``_foreach_`` are left out.
ELEMENTWISE = frozenset(
    """
    abs absolute acos add addcdiv addcmul and asin atan atan2 bfloat16 bitwise_and bitwise_not bitwise_or bool ceil
    clamp clamp_max clamp_min clip clone contiguous copy copysign cos cpu cuda detach div divide double empty_like eq
    erf exp exp2 expm1 fill fix float floor floor_divide fmax fmin fmod frac full_like ge get_data get_grad gt half
    heaviside hypot isclose isfinite isinf isnan le lerp log log10 log1p log2 logical_and logical_not logical_or lt
    masked_fill maximum minimum mul multiply nan_to_num ne neg negative new_empty new_full new_ones new_zeros nextafter
    ones_like or pin_memory positive pow reciprocal relu remainder requires_grad round rsqrt set_data set_grad sgn
    sigmoid sign signbit sin sinh sqrt square sub subtract tan tanh threshold to true_divide truediv trunc type
    type_as where xlogy xor zero zeros_like
    alias bernoulli cauchy constant exponential geometric kaiming_normal kaiming_uniform log_normal normal
    ones rand_like randn_like trunc_normal uniform xavier_normal xavier_uniform zeros
    non_finite_check_and_unscale adagrad adam adamw sgd
    """.split()
)

#: Whose answer without a dim does not depend on the order.
ORDERLESS = frozenset(
    """
    all allclose amax amin any count_nonzero equal item max mean median min nanmean nansum norm prod std sum var
    vector_norm linalg_vector_norm dist logsumexp
    """.split()
)

#: What reads or writes by position and returns no tensor.
FORBIDDEN = frozenset(["__setitem__", "tolist", "numpy", "__array__", "set_real", "set_imag"])


def name_of(function: Any) -> str:
    """Return the plain name: ``add`` for ``add_``, ``_foreach_add`` and ``+``; ``get_grad`` for reading ``.grad``."""
    name: str = getattr(function, "__name__", "")
    if name in _DESCRIPTORS:
        return f"{_DESCRIPTORS[name]}_{getattr(function.__self__, '__name__', '')}"
    if name in FORBIDDEN:
        return name
    if kernel := _KERNEL.match(name):
        name = kernel[2]
    elif operator := _OPERATOR.match(name):
        # ``__round__`` and ``__rsub__`` begin alike
        return next((plain for plain in (name[2:-2], operator[1]) if plain in ELEMENTWISE), name)
    return name.rstrip("_")


def is_unknown_kernel(function: Any) -> bool:
    """Whether it works on lists in place, so that there is no answer to judge, and is not known."""
    name = name_of(function)
    return bool(_KERNEL.match(getattr(function, "__name__", ""))) and name not in ELEMENTWISE | ORDERLESS
