"""Prove that the user's own code follows the cuts: trace it again on a rank's share and compare, op by op.

Reads the placed cuts. A literal size that contains a cut factor shows as another shape, another op or an error at a
line of the user's code; the cuts it touches are sent back with that line. Changes no module.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from autoshard.errors import TraceError
from autoshard.ir import Meta, Op, Traced
from autoshard.nested import set_integer
from autoshard.passes.cut import Cut
from autoshard.passes.factors import count
from autoshard.passes.literals import numbers_of, wrong_number
from autoshard.passes.rules import Literal
from autoshard.passes.states import Placed
from autoshard.passes.trace import Stopped, Trace
from autoshard.paths import split, update
from autoshard.plans import Refusal
from autoshard.rewrite.pickled import install

_MARK = "autoshard.made_whole"
#: What only lays out: a rank's share may lie as it should already, and then torch runs nothing.
_LAYOUT = "aten.contiguous"


@torch.library.custom_op("autoshard::made_whole", mutates_args=())
def _made_whole(x: Tensor, dim: int, size: int) -> Tensor:
    """Stands in for an all-gather in a trace: ``size`` elements along ``dim``."""
    shape = list(x.shape)
    shape[dim] = size
    return x.new_empty(shape)


@_made_whole.register_fake
def _(x: Tensor, dim: int, size: int) -> Tensor:
    shape = list(x.shape)
    shape[dim] = size
    return x.new_empty(shape)


@dataclass(frozen=True)
class Localise:
    """Check sizes in the user's code against the cuts.

    Attributes:
        given: the example inputs the model was traced with, or None.
    """

    given: Any = None

    def run(self, model: nn.Module, placed: Placed) -> Mapping[str, Refusal]:
        """Return the cuts, by key, that the code does not follow, each with the line that forbids it."""
        if not placed.chosen.cuts:
            return {}
        expected = placed.chosen.factored.traced
        try:
            share = Trace(self.given, self._shapes(placed), partial(_prepare, placed), self._gather(placed))
            got = share.run(model)
        except TraceError as error:
            return _blame_line(placed, error)
        return _compare(placed, expected, got)

    def _shapes(self, placed: Placed) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {}
        chosen = placed.chosen
        for tensor in (*chosen.factored.traced.parameters, *chosen.factored.traced.buffers):
            if tensor.fqn in chosen.divisions and tensor.value:
                shapes[tensor.fqn] = chosen.local_shape(tensor.value)
        return shapes

    def _gather(self, placed: Placed) -> Any:
        gathers: dict[str, dict[str, tuple[int, int]]] = defaultdict(dict)
        metas = placed.chosen.factored.traced.metas()
        for c in placed.conversions:
            if c.kind.startswith("S(") and c.side == "outputs":
                dim = int(c.kind[2 : c.kind.index(")")])
                gathers[c.fqn][c.path] = (dim, metas[c.value].shape[dim])

        def after(fqn: str, result: Any) -> Any:
            if fqn not in gathers:
                return None
            for path, (dim, size) in gathers[fqn].items():
                result = update(result, split(path), partial(_made_whole, dim=dim, size=size), fqn)
            return result

        return after


def _prepare(placed: Placed, twin: nn.Module) -> None:
    """Do to the twin what the executor will do to the model.

    A row-cut table takes local row numbers: its padding row, a global one, is the executor's business.
    """
    modules = dict(twin.named_modules())
    for (fqn, name), value in placed.settings.items():
        if fqn in modules:
            set_integer(modules[fqn], name, value)
    for fqn, rewrites in placed.rewrites.items():
        if fqn in modules:
            install(modules[fqn], rewrites, partial(_stand_in, placed.chosen.degree))
    for fqn in placed.lookups:
        if getattr(modules.get(fqn), "padding_idx", None) is not None:
            modules[fqn].padding_idx = None


def _stand_in(degree: int, kind: str, value: Tensor, share: str | None = None) -> Tensor:
    """What ``convert`` means in a trace: only a gather changes a shape."""
    if not kind.startswith("S("):
        return value
    dim = int(kind[2 : kind.index(")")])
    return _made_whole(value, dim, value.shape[dim] * degree)  # type: ignore[no-any-return]


def _blame_line(placed: Placed, error: TraceError) -> dict[str, Refusal]:
    """Send back the cuts that the failing line works on; all of them where nothing is known of it.

    A graph knows the lines of forwards. What fails in a function that a forward calls is at the forward's line.
    """
    stop = error.__cause__
    module = stop.module if isinstance(stop, Stopped) else ""
    places = [error.at or "", *(stop.places if isinstance(stop, Stopped) else ())]
    why = f"the code has a literal size that does not follow the cut ({error.got})"
    cuts = next(filter(None, (_at(placed, place, module) for place in places)), None)
    return {
        cut.key: Refusal(next(iter(cut.divisions)), error.at or "", why)
        for cut in cuts or _within(placed, module) or placed.chosen.cuts
    }


def _at(placed: Placed, place: str, module: str) -> list[Cut]:
    """Return the cuts that a line works on in a module, and in those where it has the same shapes to work on.

    In every module where the line is not one of that module's: it is the code's that calls it.
    """
    ops = [op for op in placed.chosen.factored.traced.ops if place and op.where == place]
    here = {_made(placed, op) for op in ops if op.module == module}
    return _working(placed, [op for op in ops if not here or _made(placed, op) in here])


def _within(placed: Placed, module: str) -> list[Cut]:
    return _working(placed, [op for op in placed.chosen.factored.traced.ops if module and op.module == module])


def _working(placed: Placed, ops: Sequence[Op]) -> list[Cut]:
    names = {name for op in ops for name in [op.name, *op.refs()]}
    return [cut for cut in placed.chosen.cuts if any(value in names for value, _ in cut.touched)]


def _made(placed: Placed, op: Op) -> tuple[Any, ...]:
    """Return what an op makes, and of that what a rank has."""
    return op.target, tuple(_metas(op)), tuple(_local_shapes(placed, op))


def _compare(placed: Placed, expected: Traced, got: Traced) -> dict[str, Refusal]:
    refused: dict[str, Refusal] = {}
    whole = [op for op in expected.ops if op.target != _LAYOUT]
    local = [op for op in got.ops if op.target not in (_MARK, _LAYOUT)]
    numbers = numbers_of(got)
    literals: dict[str, list[Literal]] = defaultdict(list)
    for literal in placed.chosen.factored.literals:
        literals[literal.op].append(literal)
    for want, have in zip(whole, local, strict=False):
        problem = _difference(placed, want, have, literals[want.name], numbers)
        if problem is None:
            continue
        for cut in _touching(placed, want):
            refused.setdefault(cut.key, Refusal(next(iter(cut.divisions)), want.where, problem))
        if want.target != have.target:
            break
    if not refused and len(whole) != len(local):
        why = f"the code takes another path on a rank's share ({len(local)} ops instead of {len(whole)})"
        refused = {cut.key: Refusal(next(iter(cut.divisions)), "", why) for cut in placed.chosen.cuts}
    return refused


def _difference(
    placed: Placed, want: Op, have: Op, literals: list[Literal], numbers: Mapping[str, tuple[int, ...]]
) -> str | None:
    if want.target != have.target:
        return f"the code runs {have.target} instead of {want.target} on a rank's share"
    needed = _local_shapes(placed, want)
    shapes = [m.shape if m else None for m in _metas(have)]
    for need, shape in zip(needed, shapes, strict=False):
        if need != shape:
            return f"a literal size in the code does not follow the cut: {_show(shape)}, needed {_show(need)}"
    chosen = placed.chosen
    return wrong_number(literals, want, have, numbers, chosen.leaves_in(want.name), chosen.ways)


def _local_shapes(placed: Placed, op: Op) -> list[tuple[int, ...] | None]:
    chosen = placed.chosen
    shapes: list[tuple[int, ...] | None] = []
    tensors = chosen.factored.tensors(op.name)
    for number, meta in enumerate(_metas(op)):
        if meta is None or number >= len(tensors):
            shapes.append(meta.shape if meta else None)
            continue
        shapes.append(chosen.local_shape(op.name, number))
    return shapes


def _touching(placed: Placed, op: Op) -> list[Cut]:
    """Return the cuts an op's operands or results have; every cut of the graph if it has none."""
    values = [op.name, *op.refs()]
    found = []
    for cut in placed.chosen.cuts:
        if cut.gathered:
            if any(value in values for value, _ in cut.touched):
                found.append(cut)
            continue
        dims = [d for v in values for t in placed.chosen.factored.tensors(v) for d in t]
        if any(count(dim, cut.leaves) for dim in dims):
            found.append(cut)
    return found or list(placed.chosen.cuts)


def _metas(op: Op) -> list[Meta | None]:
    return list(op.result) if isinstance(op.result, tuple) else [op.result]


def _show(shape: tuple[int, ...] | None) -> str:
    return "(" + ", ".join(map(str, shape or ())) + ")"
