"""How many bytes of activations a plan moves: counted on the traced graph, at the sizes it was traced with.

A conversion is counted once for each call of its module: an all-reduce by its input, a gather by its output. Modules
that take one value in (q, k and v) move its gradient once: this is what a plan needs, not what an executor does that
enters each module alone. Gradient sums of parameters are left out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from autoshard.dtypes import dtype_bytes
from autoshard.executor.collectives import Conversion
from autoshard.ir import Call, Meta, Traced
from autoshard.plans import ModulePlan, Plan

#: Conversions that move the value, and those that move its gradient.
_FORWARD, _BACKWARD = ("P->R", "S(d)->R"), ("R->V", "R->S(d)")


def moved_bytes(plan: Plan, traced: Traced) -> int:
    """Return the bytes that the activation conversions of ``plan`` move in one forward and backward."""
    metas = traced.metas()
    still = {s.name for s in traced.sources if not s.trainable}
    calls: dict[str, list[Call]] = defaultdict(list)
    for call in traced.calls:
        calls[call.fqn].append(call)
    entered: set[tuple[str, str | None]] = set()
    total = 0
    for fqn, module in plan.module_plans():
        for call in calls[fqn]:
            total += sum(_output_bytes(call, path, text, metas) for path, text in module.outputs.items())
            total += sum(_input_bytes(call, path, module, metas, entered, still) for path in module.inputs)
    return total


def _output_bytes(call: Call, path: str, text: str, metas: Mapping[str, Meta]) -> int:
    value = call.outputs.get(path)
    if value is None and not path:  # a style names the answer: its first tensor, where there are several
        value = call.outputs.get("0")
    return _bytes(metas[value]) if value is not None and Conversion.parse(text).kind in _FORWARD else 0


def _input_bytes(
    call: Call,
    path: str,
    module: ModulePlan,
    metas: Mapping[str, Meta],
    entered: set[tuple[str, str | None]],
    still: set[str],
) -> int:
    value = call.inputs.get(path)
    conversion = Conversion.parse(module.inputs[path])
    key = (value or "", module.share.get(path))
    if value is None or conversion.kind not in _BACKWARD or value in still or key in entered:
        return 0
    entered.add(key)
    meta = metas[value]
    if conversion.span is None:
        return _bytes(meta)
    low, high = conversion.span
    return _bytes(meta) // meta.shape[-1] * (high - low)


def _bytes(meta: Meta) -> int:
    return meta.numel * dtype_bytes(meta.dtype)
