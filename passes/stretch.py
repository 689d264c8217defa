"""Stretches of a graph that can work on one slice of the sequence: their values, and the conversions at their ends.

A stretch begins where a partial sum is reduced (``P->S`` for ``P->R``), or where a whole value enters a module
(``R->S``); it goes through ops that treat the sequence as they would a batch, and ends where a value enters a region
(``S->V`` for ``R->V``) or something that needs all of it (``S->R``). Each end is an argument or an answer of a module.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from autoshard.ir import Call, Op
from autoshard.passes.along import Along
from autoshard.passes.factors import Factor
from autoshard.passes.readers import Readers
from autoshard.passes.rules import SHAPED
from autoshard.passes.states import Conversion, Placed, State

_WHOLE = "what follows needs all of the sequence"
_SUM = "each rank takes the sum of its part of the sequence"
_PART = "what follows works on a part of the sequence"


@dataclass(frozen=True)
class Found:
    """The stretches along one sequence.

    Attributes:
        dims: the cut dim of each value, by name; negative.
        conversions: at their ends.
        parameters: those used on them.
    """

    dims: dict[str, int]
    conversions: list[Conversion]
    parameters: frozenset[str]


@dataclass
class Finder:
    """Finds the largest stretches along one sequence.

    Attributes:
        placed: the plan with a whole sequence.
        sequence: the extent.
        parameters: what ops work with.
        drawing: the ops that draw random numbers, or may in training, by name of the module whose own code they are in.
    """

    placed: Placed
    sequence: Factor
    parameters: Readers
    drawing: Mapping[str, list[Op]]
    members: set[str] = field(default_factory=set)
    sources: dict[str, Conversion] = field(default_factory=dict)
    banned: frozenset[str | tuple[int, str]] = frozenset()

    def __post_init__(self) -> None:
        placed, chosen = self.placed, self.placed.chosen
        self.index = chosen.index
        self.traced = chosen.factored.traced
        self.calls: dict[int, Call] = {call.id: call for call in self.traced.calls}
        self.returned = {output.value for output in self.traced.outputs}
        self.along = Along(chosen, self.sequence)
        self.dim, self.holds = self.along.dim, self.along.holds
        self.entries: dict[str, list[Conversion]] = defaultdict(list)
        self.others: dict[str, list[Conversion]] = defaultdict(list)
        self.taken = {(c.call, c.side, c.path) for c in placed.conversions}
        for c in placed.conversions:
            (self.entries if c.kind == "R->V" else self.others)[c.value].append(c)

    def run(self, banned: frozenset[str | tuple[int, str]]) -> Found:
        """Return the stretches without some values: cut nowhere, or, as ``(call, value)``, not where they enter it."""
        self.banned = banned
        self.members = {op.name for op in self.traced.ops if op.name not in banned and self._is_member(op)}
        self.sources = {
            value: found[0]
            for value, found in self.others.items()
            if value not in banned and len(found) == 1 and self._is_source(value, found[0])
        }
        while self._shrink() or self._prune():
            pass
        conversions: list[Conversion] = []
        for value in self._cut():
            conversions += self._ends(value) or ()
        conversions += [replace(c, kind=f"P->S({self.dim(value)})", why=_SUM) for value, c in self.sources.items()]
        for value in self._entered():
            conversions += self._entry(value)[0]
        dims = {value: self.dim(value) for value in self._cut()}
        return Found(
            {value: dim for value, dim in dims.items() if dim is not None},
            conversions,
            frozenset(self.parameters.of(self.index.ops[name] for name in self.members)),
        )

    # ---- what can be on a stretch
    def _many(self, value: str) -> bool:
        op = self.index.ops.get(value)
        return op is not None and isinstance(op.result, tuple)

    def _is_member(self, op: Op) -> bool:
        """Whether an op between regions carries the sequence."""
        states = self.placed.states
        whole = all(states.get(name) is State.R for name in (op.name, *op.refs()))
        whole = whole and op.name not in self.placed.logits
        written = op.name in self.along.written or not self.along.written.isdisjoint(op.refs())
        return whole and not written and not self.others.get(op.name) and self.along.carries(op)

    def _is_source(self, value: str, c: Conversion) -> bool:
        once = self.dim(value) is not None and value not in self.along.written
        once = once and self.placed.states.get(value) is State.R
        return c.kind == "P->R" and c.side != "inside" and once

    # ---- shrink until every end has a place
    def _cut(self) -> list[str]:
        return [op.name for op in self.traced.ops if op.name in self.members or op.name in self.sources]

    def _entered(self) -> list[str]:
        """Return the whole values that members read."""
        cut = {*self.members, *self.sources}
        read = (name for op in self._ops() for name in op.refs() if name not in cut and self.holds(name))
        return list(dict.fromkeys(read))

    def _ops(self) -> Iterator[Op]:
        return (op for op in self.traced.ops if op.name in self.members)

    def _uses(self, value: str) -> list[Op]:
        return [op for op in self.index.users[value] if op.name in self.members]

    def _shrink(self) -> bool:
        """Take out what has no place for a conversion; say whether anything was.

        What an op itself forbids comes first, and ends are judged from the last value on: a use that is not cut is an
        end like others, so each value is judged by uses that stay.
        """
        out = {op.name for op in self._ops() if not self._supported(op)}
        out |= self.parameters.torn(self.members - out, self.index.ops) | self._torn_draws()
        if out:
            return self._take_out(out)
        for value in self._entered():
            out |= {op.name for op in self._entry(value)[1]}
        if out:
            return self._take_out(out)
        found = False
        for value in reversed(self._cut()):
            if self._ends(value) is None:
                found = self._take_out({value})
        return found

    def _take_out(self, out: set[str]) -> bool:
        self.members -= out
        for value in out:
            self.sources.pop(value, None)
        return bool(out)

    def _supported(self, op: Op) -> bool:
        for name in op.refs():
            if self.holds(name):
                if name not in self.members and name not in self.sources and self._many(name):
                    return False
            elif self.parameters.trains(name) and name not in self.parameters.weights:
                return False  # its gradient would be partial
        return True

    def _torn_draws(self) -> set[str]:
        """Return members that draw random numbers in code that draws for something else too."""
        out: set[str] = set()
        for ops in self.drawing.values():
            mine = {op.name for op in ops} & self.members
            if mine and len(mine) < len(ops):
                out |= mine
        return out

    def _prune(self) -> bool:
        """Take out stretches on which nothing happens, or that do not pay; say whether there were any."""
        joined: dict[str, list[str]] = {name: [name] for name in self._cut()}
        for op in self._ops():
            for name in filter(self.holds, op.refs()):
                one, other = joined.setdefault(name, [name]), joined[op.name]
                if one is not other:
                    small, large = sorted((one, other), key=len)
                    large += small
                    joined.update(dict.fromkeys(small, large))
        order = {name: number for number, name in enumerate([*self._entered(), *self._cut()])}
        out: set[str] = set()
        for group in {id(group): group for group in joined.values()}.values():
            if self.members.isdisjoint(group) or not self._pays(sorted(group, key=order.__getitem__)):
                out.update(group)
        return self._take_out(out)

    def _pays(self, group: list[str]) -> bool:
        """Whether a stretch is worth its ends.

        A reduce-scatter and an all-gather send what an all-reduce sends: ``P->S`` and ``S->V`` cost what ``P->R`` and
        ``R->V`` did. ``R->S`` and ``S->R`` come on top, one gather each: at most half as many may.
        """
        sums = self.sources.keys() & group
        cut = [name for name in group if name in self.members or name in self.sources]
        ends = [c for name in cut for c in self._ends(name) or ()]
        ends += [c for name in group if name not in self.members and name not in sums for c in self._entry(name)[0]]
        partial = len({(c.value, c.share or c.call) for c in ends if c.kind.endswith("->V")})
        more = sum(c.kind.startswith("R->") or c.kind.endswith("->R") for c in ends)
        return bool(sums) and 2 * more <= len(sums) + partial

    # ---- where a stretch ends
    def _ends(self, value: str) -> list[Conversion] | None:
        """Return the conversions at the ends of a stretch, behind where the value became cut; see ``_exits``."""
        c = self.sources.get(value)
        return self._exits(value, c.call if c is not None and c.side == "inputs" else None)

    def _exits(self, value: str, scope: int | None = None) -> list[Conversion] | None:
        """Return the conversions through which others see all of ``value``; None where one has no place.

        Args:
            value: cut everywhere, or, given a scope, inside that call.
            scope: id of a call that takes it.
        """
        users = [u for u in self.index.users[value] if scope is None or scope in u.calls]
        inner = [u for u in users if u.name in self.members]
        outer = [u for u in users if u.name not in self.members]
        places = {u.name: self._place(value, u, inner, scope) for u in outer}
        left = [u for u in outer if places[u.name] is None]
        found: list[Conversion] = []
        if scope is None and (left or value in self.returned or any(c.side == "outputs" for c in self.entries[value])):
            answer = self._answer(value, inner, left)
            if answer is None:
                return None
            found += answer
            outer = [u for u in outer if answer[0].call in u.calls]
        elif left:
            return None
        for number in dict.fromkeys(places[u.name] for u in outer):
            assert number is not None, "those left were looked at"
            found += self._whole_inside(value, number)
        return found

    def _place(self, value: str, user: Op, inner: list[Op], scope: int | None) -> int | None:
        """Return the outermost call around a user that takes the value and works on all of it."""
        calls = user.calls if scope is None else user.calls[user.calls.index(scope) + 1 :]
        for number in calls:
            call = self.calls[number]
            passes = value in call.inputs.values() and value not in call.outputs.values()
            if passes and not any(number in op.calls for op in inner):
                return number
        return None

    def _whole_inside(self, value: str, number: int) -> Iterator[Conversion]:
        """Yield what makes a value whole where it enters a call: with a partial gradient, if it is used in regions."""
        call, dim = self.calls[number], self.dim(value)
        inside = [c for c in self.entries[value] if c.side == "inputs" and self._within(c.call, number)]
        users = [u for u in self.index.users[value] if number in u.calls and u.target not in SHAPED]
        partial = bool(inside) and all(any(c.call in u.calls for c in inside) for u in users)
        share = {c.path: c.share for c in inside if c.call == number}
        paths = [path for path, taken in call.inputs.items() if taken == value]
        for path in paths:
            kind = f"S({dim})->{'V' if partial else 'R'}"
            yield Conversion(number, call.fqn, "inputs", path, kind, value, _WHOLE, share.get(path))
        for c in inside if partial else ():
            if c.call != number:
                yield replace(c, kind="", why="it was made whole with a partial gradient further out")

    def _within(self, number: int | None, outer: int) -> bool:
        while number is not None and number != outer:
            number = self.calls[number].parent
        return number is not None

    def _answer(self, value: str, inner: list[Op], left: list[Op]) -> list[Conversion] | None:
        """Return what makes a value whole where a call returns it, for all who use it outside of that call."""
        made = self.index.ops[value]
        wanted = {c.call for c in self.entries[value] if c.side == "outputs"}
        for number in reversed(made.calls):
            call = self.calls[number]
            paths = [path for path, one in call.outputs.items() if one == value]
            source = self.sources.get(value)
            if source is not None and (source.call == number or not self._within(source.call, number)):
                continue  # it becomes cut there, or further out
            if not paths or any(number not in op.calls for op in inner) or any(number in op.calls for op in left):
                continue
            if wanted and wanted != {number}:
                continue
            kind = f"S({self.dim(value)})->{'V' if wanted else 'R'}"
            return [Conversion(number, call.fqn, "outputs", path, kind, value, _WHOLE) for path in paths]
        return None

    # ---- where a stretch begins with a whole value
    def _entry(self, value: str) -> tuple[list[Conversion], list[Op]]:
        """Return the conversions through which members see their part of a whole value, and members that do not."""
        found: dict[int, list[Conversion]] = {}
        left: list[Op] = []
        for user in self._uses(value):
            if any(number in user.calls for number in found):
                continue
            for number in user.calls:
                call = self.calls[number]
                paths = [path for path, taken in call.inputs.items() if taken == value]
                if not paths or value in call.outputs.values() or (number, value) in self.banned:
                    continue
                exits = self._exits(value, scope=number)
                if exits is None or any((number, "inputs", path) in self.taken for path in paths):
                    continue
                kind = f"R->S({self.dim(value)})"
                found[number] = [
                    *(Conversion(number, call.fqn, "inputs", path, kind, value, _PART) for path in paths),
                    *exits,
                ]
                break
            else:
                left.append(user)
        return [c for conversions in found.values() for c in conversions], left
