"""Bytes and collectives of a placed model on a mesh.

Symbols: ``t`` tp degree, ``s`` dp_shard, ``r`` dp_replicate, ``p`` the numel of a parameter on one tp rank, ``e`` bytes
of an element. All figures are bytes on rank 0.

(1) parameters   sum of e * ceil(d0 / s) * (p / d0), d0 the first dim             -> ``local_bytes``
(2) gradients    as (1), over trainable parameters                                -> ``memory``
(3) optimizer    2 * (2): the two moments of AdamW, in the parameter's dtype      -> ``memory``
(4) gathered     the root's parameters and twice the largest other unit's         -> ``memory``
(5) activations  results of differentiable ops that are no views, each once: an upper bound without checkpointing
                                                                                  -> ``activation_bytes``
(6) collectives  one per conversion, per unit and gradient sum                    -> ``collectives``
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autoshard.dtypes import dtype_bytes
from autoshard.ir import Meta, Op
from autoshard.passes.factors import Factor, find, ways_of
from autoshard.passes.states import Placed, State
from autoshard.plans import Collective, Mesh, TensorPlan, Workload

_VIEWS = frozenset(
    f"aten.{name}"
    for name in """
    view reshape slice select narrow transpose permute t unsqueeze squeeze expand unbind split chunk alias
    split_with_sizes flatten unflatten detach
    """.split()
)


@dataclass(frozen=True)
class Sizes:
    """Extents under a workload: batch and sequence take its sizes, cut factors their share."""

    placed: Placed
    workload: Workload
    named: Mapping[Factor, int]

    @staticmethod
    def of(placed: Placed, workload: Workload) -> Sizes:
        """Find the batch and sequence factors by the inputs they come from."""
        wanted = {"batch": workload.batch, "sequence": workload.sequence}
        named: dict[Factor, int] = {}
        factored = placed.chosen.factored
        for name, dims in factored.traced.workload_dims.items():
            for label, factor in zip(dims, factored.single(name), strict=False):
                if label in wanted:
                    named[find(factor)] = wanted[label]
        return Sizes(placed, workload, named)

    def extent(self, factor: Factor, cut: frozenset[Factor]) -> int:
        """Return the elements one tp rank holds of an extent."""
        factor = find(factor)
        if factor in self.named:
            return self.named[factor]
        if factor.kind == "leaf":
            return factor.size // ways_of(factor, cut, self.placed.chosen.ways)
        sizes = [self.extent(child, cut) for child in factor.children]
        return math.prod(sizes) if factor.kind == "product" else sum(sizes)

    def bytes(self, value: str, meta: Meta, whole: bool = False) -> int:
        """Return the bytes one tp rank holds of a value; all of it if ``whole``."""
        cut = frozenset[Factor]() if whole or self.placed.states.get(value) is not State.S else self.placed.chosen.inner
        dims = self.placed.chosen.factored.single(value)
        element = dtype_bytes(self.workload.dtype) if meta.is_float else dtype_bytes(meta.dtype)
        return element * math.prod(self.extent(dim, cut) for dim in dims)


def local_bytes(tensor: TensorPlan) -> int:
    """Equation 1 for one tensor: its bytes on rank 0."""
    return math.prod(tensor.local_shape) * dtype_bytes(tensor.dtype)


def gathered_bytes(tensor: TensorPlan, mesh: Mesh) -> int:
    """Return the bytes of a tensor on one tp rank when FSDP has gathered it."""
    shape = list(tensor.shape)
    if tensor.tp_dim is not None:
        shape[tensor.tp_dim] //= mesh.tp
    return math.prod(shape) * dtype_bytes(tensor.dtype)


def activation_bytes(placed: Placed, sizes: Sizes) -> int:
    """Equation 5: bytes saved for backward, at most, on one tp rank."""
    total = 0
    needs: set[str] = {s.name for s in placed.chosen.factored.traced.sources if s.trainable}
    for op in placed.chosen.factored.traced.ops:
        if op.no_grad or not any(name in needs for name in op.refs()):
            continue
        needs.add(op.name)
        if isinstance(op.result, Meta) and op.result.is_float and op.target not in _VIEWS:
            total += sizes.bytes(op.name, op.result)
    return total


def memory(
    parameters: Mapping[str, TensorPlan],
    buffers: Mapping[str, TensorPlan],
    units: Sequence[tuple[str, ...]],
    mesh: Mesh,
    activations: int,
) -> dict[str, int]:
    """Equations 1 to 5: bytes on rank 0 by kind. ``units`` holds parameter names, the root's last."""
    own = {fqn: t for fqn, t in parameters.items() if t.tied_to is None}
    weights = sum(local_bytes(t) for t in own.values())
    gradients = sum(local_bytes(t) for t in own.values() if t.trainable)
    gathered = [sum(gathered_bytes(own[fqn], mesh) for fqn in unit if fqn in own) for unit in units]
    held = (gathered[-1] + 2 * max(gathered[:-1], default=0)) if mesh.dp_shard > 1 and gathered else 0
    return {
        "parameters": weights,
        "gradients": gradients,
        "optimizer": 2 * gradients,
        "buffers": sum(local_bytes(t) for t in buffers.values() if t.tied_to is None),
        "gathered units": held,
        "activations (at most)": activations,
    }


def collectives(
    placed: Placed,
    sizes: Sizes,
    parameters: Mapping[str, TensorPlan],
    units: Sequence[tuple[str, ...]],
    mesh: Mesh,
) -> tuple[Collective, ...]:
    """Equation 6: collectives of one forward and backward, size-1 axes left out."""
    found: dict[tuple[str, str, str], list[int]] = defaultdict(lambda: [0, 0])

    def add(axis: str, op: str, what: str, size: int) -> None:
        found[axis, op, what][0] += 1
        found[axis, op, what][1] += size

    if mesh.tp > 1:
        _activations(placed, sizes, add)
        for unit in units:
            summed = [parameters[f] for f in unit if parameters[f].grad_sum and parameters[f].trainable]
            if summed:
                total = sum(math.prod(t.shape) * dtype_bytes(t.dtype) for t in summed)
                add("tp", "all_reduce", "gradient sum", total)
    for number, unit in enumerate(units):
        tensors = [parameters[f] for f in unit if parameters[f].tied_to is None]
        if not tensors or mesh.data == 1:
            continue
        whole = sum(_padded(t, mesh) for t in tensors)
        gradients = sum(_padded(t, mesh) for t in tensors if t.trainable)
        if mesh.dp_shard > 1:
            add("dp_shard", "all_gather", "parameter", whole)
            if number + 1 < len(units):  # the root keeps its parameters for backward
                add("dp_shard", "all_gather", "parameter", whole)
            if gradients:
                add("dp_shard", "reduce_scatter", "gradient", gradients)
        if mesh.dp_replicate > 1 and gradients:
            add("dp_replicate", "all_reduce", "gradient", gradients // mesh.dp_shard)
    return tuple(Collective(axis, op, n, size, what) for (axis, op, what), (n, size) in found.items())


def _padded(tensor: TensorPlan, mesh: Mesh) -> int:
    """Return the bytes of a gathered parameter: every rank's rows padded to rank 0's."""
    return local_bytes(tensor) * mesh.dp_shard


def _activations(placed: Placed, sizes: Sizes, add: object) -> None:
    metas = placed.chosen.factored.traced.metas()
    entered: set[tuple[str, str | None]] = set()
    for c in placed.conversions:
        meta = metas[c.value]
        if c.kind == "R->V":
            if (c.value, c.share) in entered:
                continue
            entered.add((c.value, c.share))
            if not _takes_gradient(placed, c.value):
                continue
        op = "all_gather" if c.kind.startswith("S(") else "all_reduce"
        add("tp", op, "activation", sizes.bytes(c.value, meta, whole=True))  # type: ignore[operator]
        if c.kind.endswith("->V") and c.kind != "R->V":
            add("tp", "all_reduce", "activation", sizes.bytes(c.value, meta, whole=True))  # type: ignore[operator]


def _takes_gradient(placed: Placed, value: str) -> bool:
    """Whether backward reaches a value: not so for an input that asks for no gradient."""
    return all(s.name != value or s.trainable for s in placed.chosen.factored.traced.sources)


def matmul_flops(op: Op, placed: Placed, sizes: Sizes) -> int:
    """Return the multiply-adds x 2 of a matmul or attention op over all tp ranks; 0 for any other op."""
    factored = placed.chosen.factored
    none = frozenset[Factor]()
    if op.target == "aten.scaled_dot_product_attention":
        query, key, value = (factored.single(op.arguments[n].name) for n in ("query", "key", "value"))
        rows = math.prod(sizes.extent(d, none) for d in query[:-1])
        return 2 * rows * sizes.extent(key[-2], none) * (sizes.extent(query[-1], none) + sizes.extent(value[-1], none))
    summed = [c.factor for c in factored.contractions if c.op == op.name and c.kind == "matmul"]
    if not summed:
        return 0
    rows = math.prod(sizes.extent(d, none) for d in factored.single(op.name))
    return 2 * rows * math.prod(sizes.extent(f, none) for f in summed)
