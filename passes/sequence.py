"""Cut the sequence between regions: sequence parallelism.

Reads the placed cuts. Decides which values between regions become one slice of the sequence on each rank, so that an
all-reduce becomes a reduce-scatter and an all-gather, and norms, residuals and dropout run on a part of it. Leaves all
as it was for runs without gradients. Gives up, with the line, what reads a size of the sequence there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from torch import nn

from autoshard.ir import Call
from autoshard.passes.draws import draw_homes
from autoshard.passes.factors import Factor, find
from autoshard.passes.leaks import Leaks, Seen
from autoshard.passes.readers import Readers
from autoshard.passes.states import Conversion, Placed, Stretches
from autoshard.passes.stretch import Finder, Found

#: How often stretches shrink around code that reads a size, before all are given up.
_ROUNDS = 8
_WHY = "it works on each rank's part of the sequence, so its gradient is partial"


@dataclass(frozen=True)
class Sequence:
    """Cut the sequence over tp between regions.

    Attributes:
        in_training: how often the own code of a module was heard to draw random numbers in training.
    """

    in_training: Mapping[str, int] = field(default_factory=dict)
    _searches: list[_Search] = field(default_factory=list, compare=False, repr=False)

    def run(self, model: nn.Module, placed: Placed) -> Placed:
        """Return the placed cuts with stretches along the sequence; with none, and the reason, where there are none."""
        search = self._search_of(placed)
        return placed if search is None else _along(placed, _shrunk(search, placed, model))

    def hope(self, placed: Placed) -> Placed:
        """Return what ``run`` does where the code reads no size of the sequence: for a price, never to apply."""
        search = self._search_of(placed)
        return placed if search is None else _along(placed, search.hoped)

    def _search_of(self, placed: Placed) -> _Search | None:
        """Return the search of placed cuts: one for all degrees that place the same, for their prices and the plan."""
        if placed.chosen.degree == 1 or not placed.chosen.cuts:
            return None
        known = next((search for search in self._searches if search.suits(placed)), None)
        if known is None:
            known = _Search(placed, self.in_training)
            self._searches.append(known)
        return known


class _Search:
    """Looks for stretches of placed cuts along every sequence of the model, and remembers what it found."""

    def __init__(self, placed: Placed, in_training: Mapping[str, int]) -> None:
        self.placed = placed
        self.sequences = _sequences(placed)
        readers, drawing = Readers(placed), draw_homes(placed.chosen.factored.traced, in_training)
        self.finders = [Finder(placed, one, readers, drawing) for one in self.sequences]
        self.known: dict[frozenset[Seen], list[Found]] = {}

    def suits(self, placed: Placed) -> bool:
        """Whether it would find the same of other placed cuts: a finder reads no degree."""
        mine = self.placed
        return (mine.states, mine.conversions, mine.logits) == (placed.states, placed.conversions, placed.logits)

    def run(self, banned: frozenset[Seen]) -> list[Found]:
        """Return the stretches along each sequence without some values."""
        if banned not in self.known:
            self.known[banned] = [finder.run(banned) for finder in self.finders]
        return self.known[banned]

    @cached_property
    def hoped(self) -> Stretches:
        """The stretches where the code reads no size of the sequence."""
        return _shrunk(self, self.placed, None)


def _shrunk(search: _Search, placed: Placed, model: nn.Module | None) -> Stretches:
    """Return the largest stretches that the code of a model follows; of any code that reads no size, without one."""
    if not search.sequences:
        return _given_up(["no argument of the model is a sequence"])
    banned: frozenset[Seen] = frozenset()
    notes: dict[str, None] = {}
    for _ in range(_ROUNDS):
        found = search.run(banned)
        torn = _torn_calls(placed, found)
        if torn:
            banned |= torn
            continue
        if not any(one.dims for one in found):
            notes.setdefault("nothing between two regions works on each position alone")
            return _given_up(notes)
        dims = {value: dim for one in found for value, dim in one.dims.items()}
        conversions = [c for one in found for c in one.conversions]
        leak = None if model is None else Leaks(placed, dims, conversions, search.sequences).run(model)
        if leak is None:
            return _cut(placed, search.sequences, found, notes)
        notes.setdefault(f"the code reads a size of the sequence ({leak.where or 'it takes another path'})")
        banned |= leak.values
    return _given_up(notes)


def _along(placed: Placed, stretches: Stretches) -> Placed:
    """Return the placed cuts with the stretches, on which parameters have partial gradients."""
    sums = {**placed.grad_sums, **dict.fromkeys(sorted(stretches.parameters), _WHY)}
    return replace(placed, grad_sums=sums, sequence=stretches)


def _sequences(placed: Placed) -> list[Factor]:
    """Return the extents that arguments of the model have as their sequence."""
    factored = placed.chosen.factored
    found: dict[Factor, None] = {}
    for name, labels in factored.traced.workload_dims.items():
        for label, dim in zip(labels, factored.single(name), strict=False):
            if label == "sequence" and dim.size > 1:
                found[find(dim)] = None
    return list(found)


def _torn_calls(placed: Placed, found: list[Found]) -> frozenset[Seen]:
    """Return the values converted in one call of a module and not in another: a hook acts on all of them."""
    by_call: dict[int, set[tuple[str, str, str]]] = defaultdict(set)
    values: dict[str, set[Seen]] = defaultdict(set)
    for c in (c for one in found for c in one.conversions):
        by_call[c.call].add((c.side, c.path, c.kind))
        values[c.fqn] |= {c.value, (c.call, c.value)}
    wanted: dict[str, list[set[tuple[str, str, str]]]] = defaultdict(list)
    for call in placed.chosen.factored.traced.calls:
        if call.fqn in values:
            wanted[call.fqn].append(by_call[call.id])
    torn = (fqn for fqn, each in wanted.items() if any(one != each[0] for one in each))
    return frozenset(value for fqn in torn for value in values[fqn])


def _given_up(notes: Mapping[str, None] | list[str]) -> Stretches:
    text = "; ".join(notes)
    return Stretches(notes=(f"the sequence stays whole between regions: {text}",))


def _cut(placed: Placed, sequences: list[Factor], found: list[Found], notes: Mapping[str, None]) -> Stretches:
    parameters = frozenset(fqn for one in found for fqn in one.parameters)
    conversions = _shared(c for one in found for c in one.conversions)
    dims = {value: dim for one in found for value, dim in one.dims.items()}
    arguments = _arguments(placed, [s for s, one in zip(sequences, found, strict=True) if one.dims])
    if not arguments:
        return _given_up(["the model is given it in no argument of its own"])
    return Stretches(
        dims,
        conversions,
        _returns(placed, dims, conversions),
        parameters,
        arguments,
        tuple(f"a part of the sequence's way between regions is left whole: {note}" for note in notes),
    )


def _shared(conversions: object) -> tuple[Conversion, ...]:
    """Name entries with one value that are not named yet, so that it is gathered once."""
    every: list[Conversion] = list(conversions)  # type: ignore[call-overload]
    groups: dict[tuple[str, str], list[Conversion]] = defaultdict(list)
    for c in every:
        if c.side == "inputs" and c.kind:
            groups[c.value, c.kind].append(c)
    names = {key: f"{group[0].fqn}:{group[0].path}" for key, group in groups.items() if len(group) > 1}
    return tuple(replace(c, share=c.share or names.get((c.value, c.kind))) if c.side == "inputs" else c for c in every)


def _arguments(placed: Placed, sequences: list[Factor]) -> dict[str, int]:
    """Return the model's arguments that have one of the sequences, with the dim."""
    factored = placed.chosen.factored
    root = next((call for call in factored.traced.calls if call.parent is None and not call.fqn), None)
    found: dict[str, int] = {}
    for path, value in root.inputs.items() if root is not None else ():
        labels = factored.traced.workload_dims.get(value, ())
        for number, (label, dim) in enumerate(zip(labels, factored.single(value), strict=False)):
            if label == "sequence" and find(dim) in sequences:
                found.setdefault(path, number)
    return found


def _returns(placed: Placed, dims: Mapping[str, int], conversions: tuple[Conversion, ...]) -> dict[str, dict[str, str]]:
    """Return how values are made whole that the model may hand out, at modules that return them or take them first."""
    traced = placed.chosen.factored.traced
    calls = {call.id: call for call in traced.calls}
    ends = {(c.call, c.path) for c in conversions if c.side == "outputs" and c.kind.startswith("S(")}
    found: dict[str, dict[str, str]] = defaultdict(dict)
    takers: dict[str, Call] = {}
    for one in reversed(traced.calls):
        takers |= dict.fromkeys(one.inputs.values(), one)
    for op in traced.ops:
        if op.name not in dims:
            continue
        whole = f"S({dims[op.name]})->R"
        answers = (calls[number] for number in reversed(op.calls) if op.name in calls[number].outputs.values())
        call = next(answers, None)
        if call is not None:
            paths = [path for path, value in call.outputs.items() if value == op.name]
            found[call.fqn] |= {f"returns:{path}": whole for path in paths if (call.id, path) not in ends}
        elif op.name in takers:
            taker = takers[op.name]
            found[taker.fqn] |= {f"takes:{path}": whole for path, value in taker.inputs.items() if value == op.name}
    return found
