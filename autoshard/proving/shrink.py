"""Make a model smaller in ways that its own code follows.

Narrowed are the extents that the analysis knows: those that are cut, to two for each rank, and those that are a whole
dim wherever they occur. Left out are blocks of which two of the same kind are kept. Each proposal is traced and held
against the full trace, op by op; where the code takes another path, extents are narrowed one by one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from autoshard.inputs import example_inputs
from autoshard.passes.factorise import Factored
from autoshard.passes.factors import Factor, find, leaves, narrowed
from autoshard.passes.states import Placed
from autoshard.patterns import fold
from autoshard.proving.replica import Shape, below
from autoshard.proving.smaller import WHOLE, Smaller, bounds, follows, narrow_inputs
from autoshard.twin import make_twin

#: A table keeps at least this many rows, so that different tokens stay different.
FEWEST_ROWS = 32
#: An extent that is not cut keeps at least this many elements.
FEWEST_ELEMENTS = 64
_KEPT_OF_A_KIND = 2

#: A module's structure: class, tensors, plain attributes.
Kind = tuple[Any, ...]


def shrink(model: nn.Module, tp: int, placed: Placed, given: Any = None) -> Smaller:
    """Return the boldest way to make ``model`` smaller that its code follows; nothing where it follows none.

    Args:
        model: on any device; left as it is.
        tp: number of ranks that a plan cuts it over: an extent stays a multiple of that where it is one.
        placed: its analysis at this degree.
        given: the example inputs it was traced with, or None; they must fit the smaller model as they are.
    """
    factored = placed.chosen.factored
    every = {**_other_sizes(placed, tp), **_cut_sizes(placed, tp, keep_rows=given is not None)}
    spare, notes = _spare_blocks(model, factored.traced.containers)
    inputs = None if given is not None else example_inputs(make_twin(model).model)

    def accepts(proposal: Smaller) -> bool:
        fitting = given if inputs is None else narrow_inputs(factored, inputs, proposal.sizes)
        return proposal.is_whole or follows(model, factored, proposal, fitting)

    for dropped, kept in [(spare, notes), (frozenset[str](), [])] if spare else [(spare, notes)]:
        proposal = _smaller(factored, every, dropped, kept)
        if accepts(proposal):
            return proposal
        if accepts(_smaller(factored, {}, dropped, kept)):
            return _one_by_one(factored, every, dropped, kept, accepts)
    return WHOLE


def _one_by_one(
    factored: Factored,
    every: Mapping[Factor, int],
    dropped: frozenset[str],
    notes: list[str],
    accepts: Callable[[Smaller], bool],
) -> Smaller:
    """Return the proposal with every extent that can be narrowed beside the ones before it, the largest first."""
    found = _smaller(factored, {}, dropped, notes)
    for extent in sorted({leaf.size for leaf, size in every.items() if leaf.size != size}, reverse=True):
        more = {**found.sizes, **{leaf: size for leaf, size in every.items() if leaf.size == extent}}
        proposal = _smaller(factored, more, dropped, notes)
        if accepts(proposal):
            found = proposal
    return found


def _smaller(factored: Factored, sizes: Mapping[Factor, int], dropped: frozenset[str], notes: list[str]) -> Smaller:
    shapes: dict[str, Shape] = {}
    ends: dict[str, list[dict[int, int]]] = {}
    for tensor in (*factored.traced.parameters, *factored.traced.buffers):
        if tensor.value and not below(tensor.fqn, dropped):
            dims = factored.single(tensor.value)
            shape = tuple(narrowed(dim, sizes) for dim in dims)
            if shape != tensor.meta.shape:
                shapes[tensor.fqn] = shape
                ends[tensor.fqn] = [bounds(dim, sizes) for dim in dims]
    narrower: dict[int, set[int]] = defaultdict(set)
    for leaf, size in sizes.items():
        if size != leaf.size:
            narrower[leaf.size].add(size)
    extents = [f"an extent of {old} is {' or '.join(map(str, sorted(new)))}" for old, new in sorted(narrower.items())]
    return Smaller(shapes, dropped, (*extents, *notes), sizes, ends)


def _cut_sizes(placed: Placed, tp: int, keep_rows: bool) -> dict[Factor, int]:
    """Return the narrower sizes of extents that are cut, the same for extents of the same size."""
    factored = placed.chosen.factored
    rows = {find(leaf) for c in factored.contractions if c.kind == "lookup" for leaf in leaves(c.factor)}
    cut = {find(leaf) for leaf in placed.chosen.inner | placed.chosen.gathered}
    as_rows = {leaf.size for leaf in rows}
    sizes = {}
    for leaf in cut:
        if not (keep_rows and leaf.size in as_rows):
            least = max(2 * tp, FEWEST_ROWS if leaf.size in as_rows else 0)
            sizes[leaf] = _divisor(leaf.size, least, tp)
    return sizes


def _other_sizes(placed: Placed, tp: int) -> dict[Factor, int]:
    """Return the narrower sizes of extents that are not cut and that no parameter holds as part of a dim."""
    factored = placed.chosen.factored
    alone: dict[Factor, None] = {}
    inside: set[Factor] = set()
    for tensor in factored.traced.parameters:
        for dim in factored.single(tensor.value) if tensor.value else ():
            root = find(dim)
            if root.kind == "leaf":
                alone[root] = None
            else:
                inside.update(leaves(root))
    rows = {find(leaf) for c in factored.contractions if c.kind == "lookup" for leaf in leaves(c.factor)}
    cut = placed.chosen.inner | placed.chosen.gathered
    free = [leaf for leaf in alone if leaf not in inside and leaf not in cut and leaf not in rows]
    return {leaf: _divisor(leaf.size, FEWEST_ELEMENTS, tp if leaf.size % tp == 0 else 1) for leaf in free}


def _divisor(size: int, least: int, multiple: int) -> int:
    """Return the smallest divisor of ``size`` that is at least ``least`` and a multiple of ``multiple``."""
    steps = range(multiple, size + 1, multiple)
    return next((d for d in steps if d >= least and size % d == 0), size)


def _spare_blocks(model: nn.Module, containers: Sequence[tuple[str, ...]]) -> tuple[frozenset[str], list[str]]:
    """Return the blocks of which there are two of their kind before them, and one sentence for each container."""
    dropped: list[str] = []
    notes = []
    for children in containers:
        kinds = _kinds([model.get_submodule(child) for child in children])
        kept = [n for n, kind in enumerate(kinds) if kinds[:n].count(kind) < _KEPT_OF_A_KIND]
        if len(kept) < len(children):
            dropped += [child for n, child in enumerate(children) if n not in kept]
            name = children[0].rpartition(".")[0] or "the model"
            notes.append(f"{name}: only {fold(kept).strip('{}')} of 0-{len(children) - 1}")
    return frozenset(dropped), notes


def _kinds(blocks: Sequence[nn.Module]) -> list[Kind]:
    """Return the structure of each block; an attribute that differs in every one numbers it and says nothing."""
    attributes = [dict(_attributes(block)) for block in blocks]
    names = {name for found in attributes for name in found}
    numbers = {n for n in names if len({found.get(n) for found in attributes}) == len(blocks) > 2}
    return [
        (
            tuple(type(module) for module in block.modules()),
            tuple((name, tuple(p.shape), p.requires_grad) for name, p in block.named_parameters()),
            frozenset((name, value) for name, value in found.items() if name not in numbers),
        )
        for block, found in zip(blocks, attributes, strict=True)
    ]


def _attributes(block: nn.Module) -> Iterator[tuple[str, object]]:
    for fqn, module in block.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, (bool, int, float, str, type(None))):
                yield f"{fqn}.{name}", value
