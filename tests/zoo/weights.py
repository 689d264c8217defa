"""Which parameters a trace uses, which of them are weights of matmuls, and how much of each is cut."""

from __future__ import annotations

import math

from autoshard.dtypes import dtype_bytes
from autoshard.ir import Traced
from autoshard.passes.factorise import Factored
from autoshard.passes.rules.opaque import OPAQUE
from autoshard.plans import TensorPlan


def tensor_bytes(tensor: TensorPlan) -> int:
    """Return the bytes of the whole tensor."""
    return math.prod(tensor.shape) * dtype_bytes(tensor.dtype)


def cut_share(tensor: TensorPlan) -> float:
    """Return the share of a tensor that no two tp ranks compute with alike; sliced reads count by their rows."""
    if tensor.tp_dim is not None:
        return 1.0
    pieces = tensor.slices or ()
    return sum(length for _, length, ways in pieces if ways > 1) / max(1, sum(length for _, length, _ in pieces))


def traced_parameters(traced: Traced) -> set[str]:
    """Return the parameters that a traced op takes; what only code that cannot be traced takes is not one of them."""
    values = {name for op in traced.ops if op.target != OPAQUE for name in op.refs()}
    return {t.fqn for t in traced.parameters if t.value in values}


def matmul_weights(factored: Factored) -> set[str]:
    """Return the parameters of two dims or more that a traced matmul or convolution takes, itself or a view of it."""
    traced = factored.traced
    shapes = {t.fqn: t.meta.shape for t in traced.parameters}
    origin = {s.name: s.fqn for s in traced.sources if s.kind == "parameter"}
    for op in traced.ops:
        refs = set(op.refs())
        if op.target != OPAQUE and len(refs) == 1 and (first := refs.pop()) in origin:
            origin[op.name] = origin[first]
    summing = {c.op for c in factored.contractions if c.kind not in ("lookup", "sum")}
    found = {origin[name] for op in traced.ops if op.name in summing for name in op.refs() if name in origin}
    return {fqn for fqn in found if len(shapes[fqn]) > 1}
