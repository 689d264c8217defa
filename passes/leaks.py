"""Find sizes of the sequence that the user's code reads where only a rank's part of it is: positions, masks.

The model is traced once more with stand-ins for the conversions of a cut sequence, which change lengths alone. Where an
op then has another shape or another number than it should, some size was read from a value that is cut. Which value
that was is judged by the code at fault: one that it had seen by then. Changes no module.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from autoshard.errors import TraceError
from autoshard.ir import Call, Meta, Op, Ref
from autoshard.passes.factors import Factor, find, leaves
from autoshard.passes.localise import _LAYOUT, _MARK
from autoshard.passes.states import Conversion, Placed
from autoshard.passes.trace import Stopped, Trace
from autoshard.paths import Argument, split, update

Seen = str | tuple[int, str]


@dataclass(frozen=True)
class Leak:
    """A place in the code where a size is not what it should be.

    Attributes:
        where: the user's ``file:line``.
        values: cut values that the code may have read it from; ``(call, value)`` for one that is cut where it enters
            that call.
    """

    where: str
    values: frozenset[Seen]


@dataclass(frozen=True)
class Leaks:
    """Look for sizes that are read from cut values.

    Attributes:
        placed: the plan with a whole sequence.
        dims: the cut dim by value.
        conversions: of a cut sequence.
        sequences: the extents that are cut.
    """

    placed: Placed
    dims: Mapping[str, int]
    conversions: Sequence[Conversion]
    sequences: Sequence[Factor]

    def run(self, model: nn.Module) -> Leak | None:
        """Return the first place at fault, or None. Its values are all there are if the place is not in the graph."""
        traced = self.placed.chosen.factored.traced
        copied = self._copies_alike()
        trace = Trace(traced.inputs, prepare=self._prepare, whole=not copied, joined=not copied)
        try:
            got = trace.run(model)
        except TraceError as error:
            return self._failed(error)
        left_out = tuple(traced.copies) if copied else ()
        fqns = {call.id: call.fqn for call in traced.calls}
        wants = [op for op in traced.ops if not any(fqns[number] in left_out for number in op.calls)]
        wants = [op for op in wants if op.target != _LAYOUT]
        haves = [op for op in got.ops if op.target not in (_MARK, _LAYOUT)]
        for want, have in zip(wants, haves, strict=False):
            if not self._same(want, have):
                return self._blame(want.where, [want])
        if len(wants) != len(haves):
            return Leak("", self._every())
        return None

    def _copies_alike(self) -> bool:
        """Whether each block that was written out as a copy converts what the block it is a copy of does."""
        traced = self.placed.chosen.factored.traced
        found: dict[str, set[tuple[str, str, str, str]]] = defaultdict(set)
        for c in self.conversions:
            steps = c.fqn.split(".")
            for n in range(1, len(steps) + 1):
                found[".".join(steps[:n])].add((".".join(steps[n:]), c.side, c.path, c.kind))
        return bool(traced.copies) and all(found[copy] == found[block] for copy, block in traced.copies.items())

    @cached_property
    def _sums(self) -> frozenset[str]:
        """The values that are made whole, and cut right behind."""
        return frozenset(c.value for c in self.conversions if c.kind.startswith("P->"))

    # ---- the trace
    def _prepare(self, twin: nn.Module) -> None:
        """Hook stand-ins for the conversions; see ``Trace.prepare``."""
        modules = dict(twin.named_modules())
        metas = self.placed.chosen.factored.traced.metas()
        by_module: dict[str, dict[tuple[str, str], Conversion]] = defaultdict(dict)
        for c in self.conversions:
            if c.fqn in modules and c.kind:
                by_module[c.fqn][c.side, c.path] = c
        for fqn, found in by_module.items():
            hooks = _StandIns([], [])
            for (side, path), c in found.items():
                dim = int(c.kind[c.kind.index("(") + 1 : c.kind.index(")")])
                size = metas[c.value].shape[dim]
                change = partial(_resized, dim=dim, size=size if c.kind.startswith("S(") else _length(size))
                if side == "inputs":
                    hooks.inputs.append((Argument(modules[fqn], path, fqn), change))
                else:
                    hooks.outputs.append((split(path), change))
            modules[fqn].register_forward_pre_hook(hooks.enter, with_kwargs=True)
            modules[fqn].register_forward_hook(hooks.leave)

    def _same(self, want: Op, have: Op) -> bool:
        if want.target != have.target:
            return False
        if [m.shape if m else None for m in _metas(have)] != list(self._shapes(want)):
            return False
        cut = self._is_cut(want)
        names = want.arguments.keys() | have.arguments.keys()
        return all(_same(want.arguments.get(name), have.arguments.get(name), cut) for name in names)

    def _shapes(self, op: Op) -> Iterator[tuple[int, ...] | None]:
        """Yield the shape of each result as it should be."""
        tensors = self.placed.chosen.factored.tensors(op.name)
        for number, meta in enumerate(_metas(op)):
            if meta is None or not self._is_cut(op) or number >= len(tensors):
                yield meta.shape if meta else None
            else:
                yield tuple(self._extent(dim) for dim in tensors[number])

    def _extent(self, factor: Factor) -> int:
        factor = find(factor)
        if factor in self.sequences:
            return _length(factor.size)
        if factor.kind == "leaf":
            return factor.size
        sizes = [self._extent(child) for child in factor.children]
        return prod(sizes) if factor.kind == "product" else sum(sizes)

    # ---- who is to blame
    def _failed(self, error: TraceError) -> Leak:
        """Return the blame for code that raised: an op on a cut value, at that line, or sizes that others came from."""
        traced, where = self.placed.chosen.factored.traced, error.at or ""
        module = error.__cause__.module if isinstance(error.__cause__, Stopped) else ""
        numbers = {call.id for call in traced.calls if call.fqn == module}
        running = [op for op in traced.ops if not numbers.isdisjoint(op.calls)]
        line = [op for op in running if op.where == where and op.calls[-1] in numbers]
        for op in line:
            if self._is_cut(op):
                return self._blame(where, [op])
        return self._blame(where, self._origins(line or running))

    def _is_cut(self, op: Op) -> bool:
        return op.name in self.dims and op.name not in self._sums

    def _origins(self, failing: list[Op]) -> list[Op]:
        """Return the ops that made, from sizes alone, what ops depend on; these themselves where there are none."""
        ops = self.placed.chosen.index.ops
        found: dict[str, Op] = {}
        pending = [op.name for op in failing]
        known = set(pending)
        while pending:
            one = ops[pending.pop()]
            refs = [name for name in one.refs() if self._holds(name)]
            if self._holds(one.name) and not refs:
                found[one.name] = one
            more = [name for name in refs if name in ops and name not in known and name not in self.dims]
            known.update(more)
            pending += more
        return list(found.values()) or failing

    def _holds(self, value: str) -> bool:
        tensors = self.placed.chosen.factored.tensors(value)
        every = {leaf for one in self.sequences for leaf in leaves(one)}
        return any(leaf in every for dims in tensors for dim in dims for leaf in leaves(dim))

    def _blame(self, where: str, ops: Iterable[Op]) -> Leak:
        """Return the cut values that the code at fault had seen, or that around it; alike in copied blocks."""
        traced = self.placed.chosen.factored.traced
        fqns = {call.id: call.fqn for call in traced.calls}
        values: set[Seen] = set()
        for op in ops:
            if self._is_cut(op):  # it was given a size of the whole, it may be
                values |= {o.name for o in self._alike(op) if o.name in self.dims}
                continue
            number = next((n for n in reversed(op.calls) if self._seen(n, op)), None)
            at = None if number is None else self._pattern(fqns[number])
            for other in self._alike(op) if at is not None else ():
                for n in other.calls:
                    if self._pattern(fqns[n]) == at:
                        values |= self._seen(n, other)
        return Leak(min((op.where for op in ops if op.where), default=where), frozenset(values) or self._every())

    def _alike(self, op: Op) -> list[Op]:
        """Return the ops of the same text in the same module, blocks that are copies taken for the same."""
        every = self.placed.chosen.factored.traced.ops
        same = (other for other in every if (other.where, other.target) == (op.where, op.target))
        at = self._pattern(op.module)
        return [other for other in same if self._pattern(other.module) == at]

    def _every(self) -> frozenset[Seen]:
        begins = ((c.call, c.value) for c in self.conversions if c.kind.startswith("R->S"))
        return frozenset([*self.dims, *begins])

    def _pattern(self, fqn: str) -> str:
        copies, outer = self.placed.chosen.factored.traced.copies, fqn
        while outer and outer not in copies:
            outer = outer.rpartition(".")[0]
        return copies[outer] + fqn.removeprefix(outer) if outer else fqn

    def _seen(self, number: int, op: Op) -> set[Seen]:
        """Return the values that the own code of a call saw while they were cut, before it came to ``op``."""
        traced = self.placed.chosen.factored.traced
        order = {one.name: i for i, one in enumerate(traced.ops)}
        ends = {(c.call, c.side, c.value) for c in self.conversions if c.kind.startswith("S(")}
        begins = {(c.call, c.value) for c in self.conversions if c.kind.startswith("R->S")}
        call: Call = next(call for call in traced.calls if call.id == number)
        found = {v for v in call.inputs.values() if (v in self.dims and (number, "inputs", v) not in ends)}
        found |= {one.name for one in traced.ops if one.calls and one.calls[-1] == number and one.name in self.dims}
        for child in traced.calls:
            if child.parent == number:
                values = (v for v in child.outputs.values() if v in self.dims)
                found |= {v for v in values if (child.id, "outputs", v) not in ends}
        seen: set[Seen] = {(number, v) for v in call.inputs.values() if (number, v) in begins}
        return seen | {value for value in found if order.get(value, -1) < order[op.name]}


@dataclass(frozen=True)
class _StandIns:
    """Forward hooks that change lengths."""

    inputs: list[tuple[Argument, Any]]
    outputs: list[tuple[tuple[str, ...], Any]]

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        known: dict[int, Tensor] = {}  # one tensor in several arguments is converted once, and code may compare them
        for argument, change in self.inputs:
            args, kwargs = argument.update(args, kwargs, partial(_once, known, change))
        return args, kwargs

    def leave(self, module: nn.Module, args: Any, answer: Any) -> Any:
        for steps, change in self.outputs:
            answer = update(answer, steps, change, "an answer")
        return answer


def _once(known: dict[int, Tensor], change: Any, value: Tensor) -> Tensor:
    if id(value) not in known:
        known[id(value)] = change(value)
    return known[id(value)]


def _resized(value: Tensor, dim: int, size: int) -> Tensor:
    made: Tensor = torch.ops.autoshard.made_whole(value, dim, size)
    return made


def _length(size: int) -> int:
    """Return a length that stands for a rank's part: no part of code may tell it from a real one, and it is another."""
    return size // 2 if size > 3 else size + 1


def _metas(op: Op) -> list[Meta | None]:
    return list(op.result) if isinstance(op.result, tuple) else [op.result]


def _same(want: Any, have: Any, cut: bool) -> bool:
    """Whether two arguments are alike: names of values may differ, sizes of a cut result too."""
    if isinstance(want, Ref) or isinstance(have, Ref):
        return type(want) is type(have)
    if isinstance(want, (list, tuple)) and isinstance(have, (list, tuple)):
        if len(want) != len(have):
            return False
        sizes = cut and all(isinstance(item, int) for item in (*want, *have))
        return sizes or all(_same(a, b, cut) for a, b in zip(want, have, strict=True))
    return bool(want == have)
