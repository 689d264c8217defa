"""What one step costs, unit by unit, as polynomials in the workload and the tensor-parallel degree.

Reads the placed cuts, the FSDP units and what autograd keeps. Decides nothing. Blocks that were written out as copies
of one that was traced cost what that one costs. Values in the dtype of the parameters are counted in the workload's:
under mixed precision a trace of a float32 model does not show what its code would widen again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
from sympy.polys.rings import PolyElement

from autoshard.dtypes import dtype_bytes
from autoshard.ir import Op
from autoshard.passes.backward import Step, worst_moment
from autoshard.passes.extents import ONE, RING, ZERO, Extents, at
from autoshard.passes.flops import Flops
from autoshard.passes.homes import Homes
from autoshard.passes.kept import Kept, Layout
from autoshard.passes.states import Conversion, Placed
from autoshard.passes.weights import Weight, weights
from autoshard.plans import Workload


@dataclass(frozen=True)
class UnitProfile:
    """What the ops of one FSDP unit cost on one rank. Sizes are bytes, as polynomials in B, T and 1/t.

    Attributes:
        module: the unit's module, ``""`` for the root: what is in no other unit.
        block: whether checkpointing recomputes it.
        kept: bytes that stay from forward to backward.
        dear: of those, results of matmuls and attention: what selective checkpointing keeps.
        entered: bytes of its arguments that take a gradient: what full checkpointing keeps.
        beyond: bytes that backward of the unit needs at its worst moment beside what is kept: gradients of activations
            and of its whole parameters, less what is freed by then.
        early: bytes of gradients of its whole parameters that are there before backward of any other unit; 0 but for
            the root, whose gradients FSDP reduces at the end.
        flops: of its matmuls and attention in one forward.
        dear_flops: as ``flops``: what selective checkpointing does not compute again.
        moved: bytes that its other ops read and write in one forward.
        launches: kernels in one forward.
        weights: its parameters on one tp rank.
    """

    module: str
    block: bool
    kept: PolyElement = ZERO
    dear: PolyElement = ZERO
    entered: PolyElement = ZERO
    beyond: PolyElement = ZERO
    early: PolyElement = ZERO
    flops: PolyElement = ZERO
    moved: PolyElement = ZERO
    launches: int = 0
    weights: tuple[Weight, ...] = ()


@dataclass(frozen=True)
class Profile:
    """What one step of a placed model costs on one rank.

    Attributes:
        units: in the order of forward, the root last.
        logits: elements of the first result of the model, over which a loss outside of it is computed, on one rank; 0
            where the model returns its loss.
        again: values that a block which is run again in backward makes once more: up to its last op that keeps any.
        guessed: ops whose kept tensors could not be found, and were said to be all.
        cut_logits: whether those logits are cut over tp.
    """

    units: tuple[UnitProfile, ...]
    logits: PolyElement
    again: frozenset[str]
    guessed: tuple[str, ...] = ()
    cut_logits: bool = False


@dataclass
class _Sums:
    """Sums of one unit while the graph is walked."""

    kept: PolyElement = ZERO
    dear: PolyElement = ZERO
    steps: list[Step] = field(default_factory=list)
    early: dict[str, PolyElement] = field(default_factory=dict)
    flops: PolyElement = ZERO
    moved: PolyElement = ZERO
    launches: int = 0
    ops: int = 0
    last: int = 0


def profile(placed: Placed, homes: Homes, workload: Workload) -> Profile:
    """Return what one step costs.

    Args:
        placed: the placed cuts.
        homes: the ops of the FSDP units.
        workload: where the moment of the most memory is looked for.
    """
    return _Walk(placed, homes, workload).run()


class _Walk:
    def __init__(self, placed: Placed, homes: Homes, workload: Workload) -> None:
        self.workload = workload
        self.placed = placed
        self.homes = homes
        self.traced = homes.traced
        self.extents = Extents.of(placed)
        self.sums = {unit: _Sums() for unit in homes.units}
        self.base: dict[str, str] = {}
        self.makers: dict[str, str] = {}
        self.held: set[str] = {s.name for s in self.traced.sources}
        self.seen: dict[str, PolyElement] = {}
        self.guessed: dict[str, None] = {}
        self.flops = Flops(placed, self.extents)
        self.inside = False  # whether an op of a unit inside the root was seen
        self.gathers: dict[str, list[Conversion]] = {}
        for conversion in placed.in_training():
            if conversion.kind.startswith("S") and not conversion.kind.endswith(("D", "L")):
                self.gathers.setdefault(conversion.value, []).append(conversion)
        self.whole: dict[str, str] = {}  # the value of which each gathered copy is made
        self.main: torch.dtype = getattr(torch, homes.main)
        self.element = dtype_bytes(workload.dtype)

    def run(self) -> Profile:
        copies, homes = self.traced.copies, self.homes
        for op in self.traced.ops:
            if op.name in homes.kept:
                self._op(op, homes.of(op.module), homes.kept[op.name])
        for value in self.placed.joined:  # made whole for the caller, who may hold them through backward
            self.sums[""].kept += self._bytes(value, whole=True)
        found = {unit: self._unit(unit) for unit in homes.units if unit not in copies}
        held = weights(self.placed, homes.units)
        units = tuple(replace(found[copies.get(u, u)], module=u, weights=held[u]) for u in homes.ordered)
        logits = self._logits()
        joined = logits in self.placed.joined
        elements = ZERO if logits is None else self.extents.numel(logits, whole=joined)
        cut = logits in self.placed.logits and not joined
        return Profile(units, elements, self._again(), tuple(self.guessed), cut)

    def _again(self) -> frozenset[str]:
        """Return what blocks make once more: torch ends a second run behind the last tensor that is kept."""
        again: set[str] = set()
        for unit in self.homes.blocks:
            sums = self.sums[self.traced.copies.get(unit, unit)]
            again.update(self.homes.made[unit][: sums.last])
        return frozenset(again)

    def size(self, polynomial: PolyElement) -> float:
        """Return a polynomial's value under the workload."""
        return float(at(polynomial, self.workload.batch, self.workload.sequence, self.placed.chosen.degree))

    def _unit(self, unit: str) -> UnitProfile:
        sums = self.sums[unit]
        entered = ZERO
        for call in self.traced.calls:
            if call.fqn == unit and unit in self.homes.blocks:
                entered += sum((self._bytes(v) for v in dict.fromkeys(call.inputs.values()) if self._grad(v)), ZERO)
                break
        beyond, early = worst_moment(sums.steps, self.size), sum(sums.early.values(), ZERO)
        return UnitProfile(
            unit,
            unit in self.homes.blocks,
            sums.kept,
            sums.dear,
            entered,
            beyond,
            early,
            sums.flops,
            sums.moved,
            sums.launches,
        )

    def _op(self, op: Op, unit: str, kept: Kept) -> None:
        sums = self.sums[unit]
        sums.ops += 1
        self.makers[op.name] = unit
        self.inside |= bool(unit)
        refs = op.refs()
        if not kept.known:
            self.guessed[op.target] = None
        shared = 0 in kept.views
        if shared:
            self.base[op.name] = self._read(op, refs[kept.views[0]])
        before = sums.kept
        for index in kept.operands:
            self._keep(self._read(op, refs[index]), unit)
        for index in kept.results:
            self._keep(op.name, unit, index)
        made = sum((self._like(op, shape) * element for shape, element in kept.made), ZERO)
        sums.kept += made
        if kept.dear and kept.grad:
            # what selective checkpointing keeps is what the op makes, before it is reduced to a part of the sequence
            sums.dear += self._bytes(op.name, made=True)
        if kept.grad and (kept.operands or kept.results or kept.made):
            sums.last = sums.ops - 1
        if kept.grad:
            sums.steps.append(self._step(op, sums.kept - before, shared))
            if not unit and self.inside:
                sums.early.update((ref, self._bytes(ref)) for ref in refs if ref in self.held and self._grad(ref))
        if not shared:
            self._time(op, sums)

    def _step(self, op: Op, kept: PolyElement, shared: bool) -> Step:
        """Return what backward of an op makes and frees."""
        makes, weights = {}, ZERO
        for ref in dict.fromkeys(op.refs()):
            if self._grad(ref):
                if ref in self.held:
                    weights += self._bytes(ref)
                else:
                    makes[ref] = self._bytes(ref)
        aside = ZERO if shared or op.name in self.flops.summed else self._bytes(op.name)
        return Step(op.name, makes, weights, kept, aside, shared)

    def _keep(self, value: str, unit: str, result: int = 0) -> None:
        """Count a value once: in the first unit that keeps it, or in its maker where all blocks may share it."""
        key = f"{value}:{result}"
        if value in self.held or key in self.seen:
            return
        own = self.whole.get(value, value)
        self.seen[key] = size = self._bytes(own, result, whole=value in self.whole)
        self.sums[unit if self._grad(own) else self.makers.get(own, unit)].kept += size

    def _read(self, op: Op, value: str) -> str:
        """Return the tensor an op reads a value from: what it is a view of, or the copy that was gathered of it."""
        for conversion in self.gathers.get(value, ()):
            if (conversion.call in op.calls) is (conversion.side != "outputs"):
                name = f"{value} gathered for {conversion.share or conversion.call}"
                self.whole[name] = value
                return name
        return self._base(value)

    def _base(self, value: str) -> str:
        return self.base.get(value, value)

    def _grad(self, value: str) -> bool:
        layouts = self.homes.layouts.get(value, ())
        return any(layout is not None and layout.grad for layout in layouts)

    def _layout(self, value: str, result: int = 0) -> Layout | None:
        layouts = self.homes.layouts.get(value, ())
        return layouts[result] if result < len(layouts) else None

    def _bytes(self, value: str, result: int = 0, whole: bool = False, made: bool = False) -> PolyElement:
        layout = self._layout(value, result)
        size = ZERO if layout is None else self.extents.numel(value, result, whole, made)
        return size if layout is None else size * self._element(layout.dtype)

    def _element(self, dtype: torch.dtype) -> int:
        """Return the bytes of an element, of the workload's dtype where that takes the place of ``dtype``."""
        return self.element if dtype is self.main else dtype.itemsize

    def _like(self, op: Op, shape: tuple[int, ...]) -> PolyElement:
        """Return the elements of a tensor made inside an op, whose dims are some of an operand's or of the result's."""
        known = [(v, layout) for v in dict.fromkeys([op.name, *op.refs()]) if (layout := self._layout(v)) is not None]
        for value, layout in known:
            if math.prod(layout.shape) == math.prod(shape):
                return self.extents.numel(value)  # a copy, its dims in another order or joined
        for value, layout in known:
            found = _some_of(shape, zip(layout.shape, self.extents.dims(value), strict=False))
            if found is not None:
                return found
        return RING(math.prod(shape))

    def _time(self, op: Op, sums: _Sums) -> None:
        """Add what an op computes and moves."""
        flops = self.flops.of(op)
        sums.launches += 1
        if flops:
            sums.flops += flops
        else:
            sums.moved += self._bytes(op.name, made=True) + sum((self._bytes(ref) for ref in op.refs()), ZERO)

    def _logits(self) -> str | None:
        """Return the first result of the model that takes a gradient."""
        results = (output.value for output in self.traced.outputs if not output.state)
        return next((value for value in results if self._grad(value)), None)


def _some_of(shape: Sequence[int], dims: Iterable[tuple[int, PolyElement]]) -> PolyElement | None:
    """Return the product of the dims that have the sizes of ``shape``, in this order; None where one is missing."""
    found, rest = ONE, iter(dims)
    for size in shape:
        if size == 1:
            continue
        extent = next((extent for number, extent in rest if number == size), None)
        if extent is None:
            return None
        found = found * extent
    return found
