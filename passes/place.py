"""Give every value its state on the tp axis and put the conversions on module boundaries.

Reads the chosen cuts. A value is **R** (the same on every rank), **V** (the same, with a partial gradient), **S** (cut)
or **P** (a partial sum). Decides where a value changes state and which parameters take a summed gradient, and sends
back cuts that no module boundary can carry out. Leaves sizes in the user's code to the next pass.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from autoshard.ir import Call, Meta, Op, Ref
from autoshard.passes.cut import Chosen, Cut
from autoshard.passes.factors import Factor, count
from autoshard.passes.rules import HOMOGENEOUS
from autoshard.plans import Refusal


class State(Enum):
    """What the ranks of the tp axis hold of a value."""

    R = "R"
    V = "V"
    S = "S"
    P = "P"


@dataclass(frozen=True)
class Conversion:
    """A change of state at a module boundary.

    Attributes:
        call: id of the module call.
        fqn: the module.
        side: ``inputs`` or ``outputs``.
        path: argument or output path.
        kind: ``"R->V"``, ``"P->R"`` or ``"S(d)->R"``.
        value: the converted value.
        share: name of the entry this is part of, where several modules enter with one value.
        why: the reason, one sentence.
    """

    call: int
    fqn: str
    side: str
    path: str
    kind: str
    value: str
    why: str
    share: str | None = None


@dataclass(frozen=True)
class Placed:
    """States and conversions for a set of cuts.

    Attributes:
        states: per value.
        grad_sums: reason by name of each parameter whose gradient is partial.
        first_rank: names of biases that are added to a partial sum.
        lookups: argument with the row numbers, by name of a module with a row-cut table.
        refused: cuts that cannot be carried out, by key.
        settings: attributes that are set so that sizes in the user's code become local, by ``(module, attribute)``.
        resizable: whether such attributes were not looked for yet.
    """

    chosen: Chosen
    states: Mapping[str, State]
    conversions: tuple[Conversion, ...]
    grad_sums: Mapping[str, str]
    first_rank: frozenset[str]
    lookups: Mapping[str, str]
    refused: Mapping[str, Refusal] = field(default_factory=dict)
    settings: Mapping[tuple[str, str], int] = field(default_factory=dict)
    resizable: bool = True


class _Refused(Exception):
    """A cut cannot be carried out at an op."""

    def __init__(self, op: Op, why: str, values: Iterable[str] = ()) -> None:
        super().__init__(why)
        self.op = op
        self.why = why
        self.values = [op.name, *op.refs(), *values]


@dataclass(frozen=True)
class Place:
    """Place the states and conversions of chosen cuts."""

    def run(self, chosen: Chosen) -> Placed:
        """Return states and conversions, or the cuts to give up in ``refused``."""
        walk = _Walk(chosen)
        try:
            walk.run()
        except _Refused as refusal:
            blamed = walk.blame(refusal.values) or list(chosen.cuts)
            refused = {cut.key: Refusal(_first(cut), refusal.op.where, refusal.why) for cut in blamed}
            return Placed(chosen, {}, (), {}, frozenset(), {}, refused)
        return Placed(
            chosen, walk.states, tuple(walk.conversions), walk.grad_sums, frozenset(walk.first_rank), walk.lookups
        )


def _first(cut: Cut) -> str:
    return next(iter(cut.tensors))


class _Walk:
    """One forward walk over the graph."""

    def __init__(self, chosen: Chosen) -> None:
        self.chosen = chosen
        self.factored = chosen.factored
        self.traced = chosen.factored.traced
        self.inner, self.gathered = chosen.inner, chosen.gathered
        self.live = {place for cut in chosen.cuts for place in cut.touched}
        self.calls: dict[int, Call] = {call.id: call for call in self.traced.calls}
        self.metas = self.traced.metas()
        self.states: dict[str, State] = {}
        self.conversions: list[Conversion] = []
        self.grad_sums: dict[str, str] = {}
        self.first_rank: set[str] = set()
        self.lookups: dict[str, str] = {}
        self.edges: dict[str, list[Op]] = defaultdict(list)
        self.ops = {op.name: op for op in self.traced.ops}
        self.order = {name: i for i, name in enumerate(self.metas)}
        self.users: dict[str, list[Op]] = defaultdict(list)
        self.parameter_of: dict[str, str] = {s.name: s.fqn for s in self.traced.sources if s.kind == "parameter"}
        self.trainable: dict[str, bool] = {}
        self.weights: set[str] = set()
        self.contracting: dict[str, list[tuple[Factor, str]]] = defaultdict(list)
        for item in self.factored.contractions:
            self.contracting[item.op].append((item.factor, item.kind))
        for op in self.traced.ops:
            for name in dict.fromkeys(op.refs()):
                self.users[name].append(op)

    def blame(self, values: Iterable[str]) -> list[Cut]:
        """Return the cuts that touch any of the values."""
        names = set(values)
        return [cut for cut in self.chosen.cuts if any(value in names for value, _ in cut.touched)]

    def run(self) -> None:
        for source in self.traced.sources:
            cut = (source.name, 0) in self.live
            self.states[source.name] = State.S if cut else State.R
            is_float = source.meta is not None and source.meta.is_float
            self.trainable[source.name] = is_float and (source.trainable or source.kind == "input")
            if source.kind != "input":
                self.weights.add(source.name)
        for op in self.traced.ops:
            self._step(op)
        for output in self.traced.outputs:
            if self.states[output.value] is not State.R and not output.state:
                op = self.ops[output.value]
                raise _Refused(op, f"the model returns it ({output.path or 'its result'}) while it is not whole")
        self._sum_gradients()
        # from the last value to the first: where a region grows backwards, earlier edges join it
        done: set[str] = set()
        while pending := [v for v in self.edges if v not in done and v not in self.weights]:
            value = max(pending, key=lambda name: self.order.get(name, -1))
            done.add(value)
            self._enter(value, self.edges[value])
        self._agree_over_calls()

    # ---- states
    def _step(self, op: Op) -> None:
        refs = list(dict.fromkeys(op.refs()))
        if refs and all(name in self.weights for name in refs):
            self.weights.add(op.name)
        result = op.result if isinstance(op.result, Meta) else None
        is_float = result.is_float if result else any(m is not None and m.is_float for m in _many(op))
        self.trainable[op.name] = is_float and not op.no_grad and any(self.trainable.get(n) for n in refs)
        if op.target == "aten.detach":
            self.trainable[op.name] = False
        states = {name: self.states[name] for name in refs}
        if self._contracts(op):
            self._partial(op, states)
        elif State.P in states.values():
            self._pass_partial(op, states)
        elif set(states.values()) <= {State.R} and not self._is_cut(op.name):
            self.states[op.name] = State.R
        else:
            self._join(op, states)
            self.states[op.name] = State.S if self._is_cut(op.name) else State.V
            dims = self.factored.single(op.name) if (op.name, 0) in self.live else []
            if any(count(dim, self.gathered) for dim in dims):
                self._gather(op)

    def _is_cut(self, value: str) -> bool:
        return any((value, number) in self.live for number in range(max(1, len(self.factored.tensors(value)))))

    def _contracts(self, op: Op) -> list[str]:
        """Return the kinds of the cut contractions of an op."""
        found = []
        for factor, kind in self.contracting.get(op.name, ()):
            if count(factor, self.inner) or (kind == "lookup" and count(factor, self.gathered)):
                found.append(kind)
        return found

    def _partial(self, op: Op, states: Mapping[str, State]) -> None:
        """A contraction over a cut factor: each rank has a partial sum, to be reduced at a boundary."""
        if State.P in states.values():
            raise _Refused(op, "a partial sum would enter another sum")
        for name in states:
            if states[name] in (State.S, State.V) or not self._is_float(name):
                continue
            if name not in self.parameter_of:
                raise _Refused(op, "a whole value would be added to a partial sum")
            self.first_rank.add(self.parameter_of[name])
        if "lookup" in self._contracts(op):
            self._look_up(op)
        self.states[op.name] = State.P
        self._reduce(op)

    def _is_float(self, name: str) -> bool:
        meta = self.metas.get(name)
        return meta is not None and meta.is_float

    def _look_up(self, op: Op) -> None:
        rows = op.arguments.get("indices")
        name = rows.name if isinstance(rows, Ref) else ""
        call = self.calls[op.calls[-1]] if op.calls else None
        path = next((p for p, v in call.inputs.items() if v == name), None) if call else None
        if call is None or path is None or any(u is not op and call.id in u.calls for u in self.users[name]):
            raise _Refused(op, "the rows of the table are picked in the module's own code, not by its argument")
        if self.lookups.setdefault(call.fqn, path) != path:
            raise _Refused(op, "the table is called with its row numbers in different arguments")

    def _pass_partial(self, op: Op, states: Mapping[str, State]) -> None:
        partial = [name for name, state in states.items() if state is State.P]
        others = [name for name in states if states[name] is not State.P and self._is_float(name)]
        alone = op.target in HOMOGENEOUS and len(partial) == 1 and op.refs().count(partial[0]) == 1
        if op.target == "aten.div" and op.arguments.get("self") != Ref(partial[0]):
            alone = False
        together = op.target in ("aten.add", "aten.sub", "aten.cat", "aten.stack") and not others
        if not (alone or together) or any(states[name] is State.S for name in others):
            raise _Refused(op, f"{op.target.split('.')[-1]} needs the whole sum, inside the module's own code")
        for name in others:
            self._edge(op, name)
        self.states[op.name] = State.P
        self._reduce(op)

    def _join(self, op: Op, states: Mapping[str, State]) -> None:
        for name, state in states.items():
            if state is State.R:
                self._edge(op, name)

    def _edge(self, op: Op, name: str) -> None:
        """A whole value is used on the ranks' shares: its gradient is partial along this edge."""
        if self.trainable.get(name):
            self.edges[name].append(op)

    # ---- boundaries
    def _reduce(self, op: Op) -> None:
        """Reduce a partial sum at the innermost module that returns it, if nothing inside uses it."""
        for call, path in self._returned_by(op):
            self._convert(call, "outputs", path, "P->R", op.name, "each rank has a part of the sum")
            self.states[op.name] = State.R
            return
        if not self.users[op.name]:
            raise _Refused(op, "the partial sum is returned by no module")

    def _gather(self, op: Op) -> None:
        dims = self.factored.single(op.name)
        dim = next(i for i, d in enumerate(dims) if count(d, self.gathered))
        for call, path in self._returned_by(op):
            self._convert(call, "outputs", path, f"S({dim - len(dims)})->R", op.name, "what follows needs it whole")
            self.states[op.name] = State.R
            return
        raise _Refused(op, "it would have to be gathered inside the module's own code")

    def _returned_by(self, op: Op) -> Iterable[tuple[Call, str]]:
        """Yield the calls, innermost first, that return a value no op inside them uses."""
        for number in reversed(op.calls):
            call = self.calls[number]
            paths = [path for path, value in call.outputs.items() if value == op.name]
            if paths and not any(number in user.calls for user in self.users[op.name]):
                for path in paths:
                    yield call, path

    def _convert(
        self, call: Call, side: str, path: str, kind: str, value: str, why: str, share: str | None = None
    ) -> None:
        self.conversions.append(Conversion(call.id, call.fqn, side, path, kind, value, why, share))

    def _enter(self, value: str, ops: list[Op]) -> None:
        """Put ``R->V`` on the arguments through which a value reaches its uses in regions, and only those."""
        names = {op.name for op in ops}
        entries: dict[tuple[int, str], None] = {}
        for op in ops:
            found = self._entry(value, op, names)
            if found is None:
                if not self._enter_at_source(value, ops) and not self._enter_before(value, ops):
                    raise _Refused(op, "the region begins inside the module's own code", [value])
                return
            entries.update(found)
        first = next(iter(entries))
        share = f"{self.calls[first[0]].fqn}:{first[1]}" if len(entries) > 1 else None
        why = "its gradient is a partial sum on each rank"
        for number, path in entries:
            self._convert(self.calls[number], "inputs", path, "R->V", value, why, share)

    def _enter_before(self, value: str, ops: list[Op]) -> bool:
        """Let the op that made the value be part of the region too, if every use of its result is.

        Any op may work on V values: what enters then is what that op reads.
        """
        names = {op.name for op in ops}
        made = self.ops.get(value)
        if made is None or any(user.name not in names for user in self.users[value]):
            return False
        if any(output.value == value for output in self.traced.outputs) or made.target == "getitem":
            return False
        sources = [n for n in dict.fromkeys(made.refs()) if self.trainable.get(n)]
        if any(n in self.weights or self.states[n] is not State.R for n in sources):
            return False
        self.states[value] = State.V
        for name in sources:
            self._edge(made, name)
        return True

    def _entry(self, value: str, op: Op, names: set[str]) -> dict[tuple[int, str], None] | None:
        """Return the outermost call around ``op`` that takes the value and uses it nowhere but in regions."""
        for number in op.calls:
            call = self.calls[number]
            paths = [path for path, taken in call.inputs.items() if taken == value]
            inside = [user for user in self.users[value] if number in user.calls]
            if paths and all(user.name in names for user in inside) and value not in call.outputs.values():
                return {(number, path): None for path in paths}
        return None

    def _enter_at_source(self, value: str, ops: list[Op]) -> bool:
        """Put ``R->V`` where a module returns the value, if every use of it is in a region."""
        names = {op.name for op in ops}
        made = self.ops.get(value)
        if made is None or any(user.name not in names for user in self.users[value]):
            return False
        if any(output.value == value for output in self.traced.outputs):
            return False
        for call, path in self._returned_by(made):
            if not any(c.call == call.id and c.side == "outputs" and c.path == path for c in self.conversions):
                why = "its gradient is a partial sum on each rank"
                self._convert(call, "outputs", path, "R->V", value, why)
                return True
        return False

    # ---- parameters
    def _sum_gradients(self) -> None:
        """A whole parameter all of whose uses are in regions takes a summed gradient; a mixture is refused."""
        for value, fqn in self.parameter_of.items():
            if fqn in self.first_rank:
                if any(not self._contracts(user) for user in self.users[value]):
                    raise _Refused(self.users[value][0], f"{fqn} is a bias of a partial sum and used elsewhere too")
                continue
            inside, outside = self._uses(value)
            if inside and outside:
                raise _Refused(inside[0], f"{fqn} is used both on whole values and on the ranks' shares")
            if inside:
                where = f" ({inside[0].where})" if inside[0].where else ""
                self.grad_sums[fqn] = f"it works on each rank's share, so its gradient is partial{where}"

    def _uses(self, value: str) -> tuple[list[Op], list[Op]]:
        """Return the ops that use a weight on shares, and those that use it on whole values."""
        inside = list(self.edges.get(value, ()))
        outside: list[Op] = []
        names = {op.name for op in inside}
        for op in self.users[value]:
            if op.name in names:
                continue
            if op.name in self.weights:
                more_inside, more_outside = self._uses(op.name)
                inside += more_inside
                outside += more_outside
            else:
                outside.append(op)
        return inside, outside

    # ---- repeated calls
    def _agree_over_calls(self) -> None:
        """A hook acts on every call of its module: all of them must want the same conversions."""
        by_call: dict[int, set[tuple[str, str, str]]] = defaultdict(set)
        for c in self.conversions:
            by_call[c.call].add((c.side, c.path, c.kind))
        wanted = {c.fqn: by_call[c.call] for c in self.conversions}
        for call in self.traced.calls:
            if call.fqn in wanted and by_call[call.id] != wanted[call.fqn]:
                values = [*call.inputs.values(), *call.outputs.values()]
                op = next((o for o in self.traced.ops if call.id in o.calls), self.traced.ops[0])
                values += [c.value for c in self.conversions if c.fqn == call.fqn]
                raise _Refused(op, f"{call.fqn or 'the model'} is called several times in different ways", values)


def _many(op: Op) -> list[Meta | None]:
    return list(op.result) if isinstance(op.result, tuple) else []
