"""The collectives of one step: what each conversion, each FSDP unit and each gradient sum sends.

Reads the placed cuts and the units. Decides nothing. Axes of one rank send nothing and are left out.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from sympy.polys.rings import PolyElement

from autoshard.dtypes import dtype_bytes, summed_in
from autoshard.passes.extents import Extents, at, multiplied
from autoshard.passes.occurrence import Occurrences
from autoshard.passes.profile import Profile
from autoshard.passes.states import Conversion, Placed
from autoshard.passes.weights import Bytes, share
from autoshard.plans import Collective, Mesh, Workload

_DIM = re.compile(r"\(-?\d+\)|\[.*\]")
#: what a conversion sends in forward and in backward
SENDS: Mapping[str, tuple[str | None, str | None]] = {
    "R->V": (None, "all_reduce"),
    "P->R": ("all_reduce", None),
    "A->R": ("all_reduce", None),
    "P->V": ("all_reduce", "all_reduce"),
    "A->V": ("all_reduce", "all_reduce"),
    "S->R": ("all_gather", None),
    "R->S": (None, "all_gather"),
    "S->V": ("all_gather", "reduce_scatter"),
    "P->S": ("reduce_scatter", "all_gather"),
    "S->D": (None, None),
    "S->L": (None, None),
    "S->LD": (None, None),
    "R->P": (None, None),
    "V->P": (None, None),
}


@dataclass(frozen=True)
class Sent:
    """What is sent over tp for activations in one step.

    Sizes are bytes: of the input of an all-reduce or reduce-scatter, of the output of an all-gather.

    Attributes:
        op: ``all_reduce``, ``all_gather`` or ``reduce_scatter``.
        size: bytes of one.
        again: whether checkpointing sends it once more.
        times: how often: equal ones are one row.
    """

    op: str
    size: PolyElement
    again: bool
    times: int = 1


def activations(placed: Placed, profile: Profile, main: str, workload: Workload) -> tuple[Sent, ...]:
    """Return what conversions send over tp.

    Args:
        placed: the placed cuts.
        profile: for what is run again in backward.
        main: the dtype that ``workload.dtype`` stands for.
        workload: for the dtype of activations, and for that of sums over tp.
    """
    extents = Extents.of(placed)
    index = placed.chosen.index
    blocks = frozenset(unit.module for unit in profile.units if unit.block)
    untouched = {s.name for s in placed.chosen.factored.traced.sources if not s.trainable}
    found: list[Sent] = []
    entered: set[tuple[str, str | None]] = set()
    for conversion in placed.in_training():
        forward, backward = SENDS[_DIM.sub("", conversion.kind)]
        meta = index.metas[conversion.value]
        dtype = _dtype(meta.dtype, main, workload)
        count = extents.numel(conversion.value, whole=True)
        shared = (conversion.value, conversion.share) in entered and conversion.share is not None
        if shared and conversion.kind.startswith("S"):
            continue
        if forward is not None:
            again = _again(conversion, index, profile.again, blocks)
            found.append(Sent(forward, count * _element(forward, dtype, workload), again))
        elif (conversion.value, conversion.share) in entered and conversion.kind.startswith("R->V"):
            continue
        if backward is not None and conversion.value not in untouched:  # backward does not reach such an input
            entered.add((conversion.value, conversion.share))
            found.append(Sent(backward, count * _element(backward, dtype, workload), False))
    found += _losses(placed, profile, extents, main, workload)
    return tuple(replace(one, times=times) for one, times in Counter(found).items())


def _losses(placed: Placed, profile: Profile, extents: Extents, main: str, workload: Workload) -> Iterator[Sent]:
    """Yield what losses on cut logits send, and the logits that are gathered where the model returns them.

    Of each row the largest logit, and then the sum of exponentials beside the target's logit, in float32 at least.
    """
    index = placed.chosen.index
    for op in (op for op in placed.chosen.factored.traced.ops if op.name in placed.losses):
        logits = op.arguments["self"].name
        rows = multiplied(extents.dims(logits)[:-1])
        size = max(dtype_bytes(_dtype(index.metas[logits].dtype, main, workload)), dtype_bytes("float32"))
        for number in (1, 2):
            yield Sent("all_reduce", number * rows * size, op.name in profile.again)
    for value in sorted(placed.joined):
        size = dtype_bytes(_dtype(index.metas[value].dtype, main, workload))
        yield Sent("all_gather", extents.numel(value, whole=True) * size, False)


def _dtype(dtype: str, main: str, workload: Workload) -> str:
    """Return the dtype of activations in the place of that of the parameters."""
    return workload.dtype if dtype == main else dtype


def _element(op: str, dtype: str, workload: Workload) -> int:
    """Return the bytes of an element as ``op`` sends it: only sums run in another dtype than the value's."""
    return dtype_bytes(dtype if op == "all_gather" else summed_in(dtype, workload.tp_reduced))


def _again(conversion: Conversion, index: Occurrences, again: frozenset[str], blocks: frozenset[str]) -> bool:
    """Whether a block that is run again in backward converts once more; what is done at its own boundary is not."""
    outer = conversion.fqn.rpartition(".")[0]
    while outer and outer not in blocks:
        outer = outer.rpartition(".")[0]
    if not outer or conversion.fqn in blocks:
        return False
    made = index.ops.get(conversion.value)
    return conversion.value in again or made is None or not made.module.startswith(outer)


def collectives(
    sent: Sequence[Sent], profile: Profile, mesh: Mesh, workload: Workload, main: str, recompute: bool, reshard: bool
) -> tuple[Collective, ...]:
    """Return the collectives of one forward and backward.

    Args:
        sent: over tp, for activations.
        profile: for the parameters of each unit.
        mesh: its degrees.
        workload: its sizes, and the dtypes of parameters.
        main: the dtype that ``workload.dtype`` stands for.
        recompute: whether blocks are run again in backward.
        reshard: whether FSDP frees a unit's parameters after its forward, and gathers them again in backward.
    """
    found: dict[tuple[str, str, str], list[int]] = defaultdict(lambda: [0, 0])

    def add(axis: str, op: str, what: str, size: int, times: int = 1) -> None:
        row = found[axis, op, what]
        row[0] += times
        row[1] += times * size

    for one in sent if mesh.tp > 1 else ():
        size = round(at(one.size, workload.batch, workload.sequence, mesh.tp))
        add("tp", one.op, "activation", size, one.times * (2 if one.again and recompute else 1))
    alike = Counter((id(unit.weights), not unit.module) for unit in profile.units)
    for unit in {(id(unit.weights), not unit.module): unit for unit in profile.units}.values():
        times = alike[id(unit.weights), not unit.module]
        sizes = [(w, Bytes.of(w, workload, main)) for w in unit.weights]
        wide = None if workload.tp_reduced is None else dtype_bytes(workload.tp_reduced)
        summed = sum(w.summed * (wide or size.reduced) for w, size in sizes)
        if summed and mesh.tp > 1:
            add("tp", "all_reduce", "gradient sum", summed, times)
        if mesh.data == 1 or not sizes:
            continue
        padded = [(w, size, share(w, mesh.dp_shard) * mesh.dp_shard) for w, size in sizes]
        gradients = sum(n * size.reduced for w, size, n in padded if w.trainable)
        if mesh.dp_shard > 1:
            # the root keeps its parameters for backward
            gathers = 2 * times if reshard and unit.module else times
            add("dp_shard", "all_gather", "parameter", sum(n * size.gathered for _, size, n in padded), gathers)
            if gradients:
                add("dp_shard", "reduce_scatter", "gradient", gradients, times)
        if mesh.dp_replicate > 1 and gradients:
            add("dp_replicate", "all_reduce", "gradient", gradients // mesh.dp_shard, times)
    return tuple(Collective(axis, op, n, size, what) for (axis, op, what), (n, size) in found.items())
