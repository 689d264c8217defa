"""FLOPs of matmuls and attention, as polynomials in the workload and the tensor-parallel degree."""

from __future__ import annotations

from collections import defaultdict

from sympy.polys.rings import PolyElement

from autoshard.ir import Meta, Op
from autoshard.passes.extents import ZERO, Extents, multiplied
from autoshard.passes.factors import Factor
from autoshard.passes.states import Placed, State

ATTENTION = "aten.scaled_dot_product_attention"


class Flops:
    """Counts twice the multiply-adds of ops; nothing but matmuls and attention has any."""

    def __init__(self, placed: Placed, extents: Extents) -> None:
        self.placed = placed
        self.extents = extents
        self.summed: dict[str, list[Factor]] = defaultdict(list)
        for item in placed.chosen.factored.contractions:
            if item.kind == "matmul":
                self.summed[item.op].append(item.factor)

    def of(self, op: Op, whole: bool = False) -> PolyElement:
        """Return the FLOPs of one forward of an op on one tp rank; of all ranks together if ``whole``."""
        if op.target == ATTENTION:
            names = (op.arguments[name].name for name in ("query", "key", "value"))
            query, key, value = (self.extents.dims(name, whole=whole) for name in names)
            return 2 * multiplied(query[:-1]) * key[-2] * (query[-1] + value[-1])
        summed = self.summed.get(op.name)
        if not summed or not isinstance(op.result, Meta):
            return ZERO
        cut = not whole and any(self.placed.states.get(ref) is State.S for ref in op.refs())
        inner = multiplied(self.extents.extent(factor, cut) for factor in summed)
        return 2 * self.extents.numel(op.name, whole=whole, made=True) * inner
