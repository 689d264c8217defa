"""The states of values, op by op, in one forward walk: what becomes cut, or partial, or V."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

from autoshard.ir import Call, Meta, Op, Ref
from autoshard.passes.cut import Chosen
from autoshard.passes.factors import count
from autoshard.passes.rules import ADDING, HOMOGENEOUS, SHAPED, VIEWS
from autoshard.passes.rules.opaque import OPAQUE
from autoshard.passes.states import Refused, State

_ZEROS = frozenset(["aten.zeros", "aten.zeros_like", "aten.new_zeros"])
#: What leaves zeros zero.
_ZEROING = frozenset(["aten.zero_", "aten.mul_", "aten.div_"])


class UsedBothWays(Refused):
    """A parameter is used on whole values and in regions: its gradient is whole along some edges, partial along others.

    Attributes:
        value: the parameter's value in the graph.
    """

    def __init__(self, op: Op, value: str, fqn: str) -> None:
        super().__init__(op, f"{fqn} is used both on whole values and on the ranks' shares")
        self.value = value


class Flow:
    """The graph with the states that chosen cuts give its values.

    Args:
        chosen: the cuts.
        entering: values of parameters that enter regions by conversions, as activations do.

    Attributes:
        states: per value.
        edges: per whole value, the ops in regions that read it: its gradient is partial along these.
        first_rank: biases that are added to a partial sum.
        origins: the ops whose sums a partial sum is made of, by value.
        alike: the ops that one instruction made, in code that was followed with made-up values.
        made: the states that ops left values in which were made whole behind them.
    """

    def __init__(self, chosen: Chosen, entering: frozenset[str] = frozenset()) -> None:
        self.chosen = chosen
        self.entering = entering
        self.factored = chosen.factored
        self.traced = chosen.factored.traced
        self.live = {place for cut in chosen.cuts for place in cut.touched}
        self.calls: dict[int, Call] = {call.id: call for call in self.traced.calls}
        self.takers: dict[str, list[Call]] = defaultdict(list)
        for call in self.traced.calls:
            for name in dict.fromkeys(call.inputs.values()):
                self.takers[name].append(call)
        self.times_called = Counter(call.fqn for call in self.traced.calls)
        self.metas = self.traced.metas()
        self.ops = chosen.index.ops
        self.order = {name: i for i, name in enumerate(s.name for s in self.traced.sources)}
        self.order |= {op.name: len(self.order) + i for i, op in enumerate(self.traced.ops)}
        self.returned = {o.value for o in self.traced.outputs if not o.state}
        self.users = chosen.index.users
        self.parameter_of: dict[str, str] = {s.name: s.fqn for s in self.traced.sources if s.kind == "parameter"}
        self.states: dict[str, State] = {}
        self.made: dict[str, State] = {}
        self.trainable: dict[str, bool] = {}
        self.weights: set[str] = set()
        self.edges: dict[str, list[Op]] = defaultdict(list)
        self.first_rank: dict[str, set[str]] = defaultdict(set)
        self.origins: dict[str, set[str]] = {}
        self.alike: dict[Any, list[Op]] = defaultdict(list)
        for op in self.traced.ops:
            if op.site:
                self.alike[_instruction(op)].append(op)
        self._bias_of: dict[str, str] = {}
        self._zeros: set[str] = set()
        self._root: dict[str, str] = {}
        self._aliases: dict[str, list[str]] = defaultdict(list)

    def start(self) -> None:
        """Give the sources their states."""
        for source in self.traced.sources:
            cut = (source.name, 0) in self.live
            self.states[source.name] = State.S if cut else State.R
            is_float = source.meta is not None and source.meta.is_float
            self.trainable[source.name] = is_float and (source.trainable or source.kind == "input")
            if source.kind != "input" and source.name not in self.entering:
                self.weights.add(source.name)
            if source.kind == "parameter":
                self._bias_of[source.name] = source.fqn

    def step(self, op: Op) -> None:
        """Give the result of ``op`` its state.

        Raises:
            Refused: the op cannot work on what its operands are.
        """
        refs = list(dict.fromkeys(op.refs()))
        self._note(op, refs)
        states = {name: self.states[name] for name in refs}
        if op.target == OPAQUE:
            if set(states.values()) - {State.R}:
                raise Refused(op, str(op.arguments["why"]), self._sums(states))
            self.states[op.name] = State.R
        elif op.target in SHAPED:
            self.states[op.name] = State.S if self.is_cut(op.name) else State.R
        elif self.contracts(op):
            self._partial(op, states)
        elif State.P in states.values():
            self._pass_partial(op, states)
        elif set(states.values()) <= {State.R} and not self.is_cut(op.name):
            self.states[op.name] = State.R
        else:
            for name, state in states.items():
                if state is State.R:
                    self.edge(op, name)
            self.states[op.name] = State.S if self.is_cut(op.name) else State.V
        for name in op.mutates:
            target = op.arguments.get(name)
            if isinstance(target, Ref):
                self._write(op, target.name)

    def _note(self, op: Op, refs: list[str]) -> None:
        """Note what the result is beside its state: of weights only, taking a gradient, zero, a view."""
        # what cut weights make is no weight: its gradient is summed where it enters a region
        whole = all(name in self.weights and self.states[name] is State.R for name in refs)
        if refs and whole and not self.is_cut(op.name):
            self.weights.add(op.name)
        result = op.result if isinstance(op.result, Meta) else None
        is_float = result.is_float if result else any(m is not None and m.is_float for m in _many(op))
        self.trainable[op.name] = is_float and not op.no_grad and any(self.trainable.get(n) for n in refs)
        if op.target == "aten.detach" or op.target in SHAPED:
            self.trainable[op.name] = False
        floats = [name for name in refs if self.is_float(name)]
        if len(floats) == 1 and floats[0] in self._bias_of and op.target in HOMOGENEOUS:
            self._bias_of[op.name] = self._bias_of[floats[0]]
        viewed = op.arguments.get("self") if op.target in VIEWS else op.arguments.get("0")
        if isinstance(viewed, Ref) and (op.target in VIEWS or op.target == "getitem"):
            self._alias(op.name, viewed.name)
            if viewed.name in self._zeros:
                self._zeros.add(op.name)
        if op.target in _ZEROS:
            self._zeros.add(op.name)

    def _alias(self, value: str, base: str) -> None:
        root = self._root.get(base, base)
        self._root[value] = root
        self._aliases[root].append(value)

    def _write(self, op: Op, target: str) -> None:
        """What is written in place is read through the base and its other views too: they take the state."""
        root = self._root.get(target, target)
        self._alias(op.name, root)
        state = self.states[op.name]
        if state is State.R:
            written = [name for name in op.refs() if self.is_float(name) and self._root.get(name, name) != root]
            nothing = bool(written) and all(name in self._zeros for name in written)
            if op.target not in _ZEROING and not nothing:
                self._zeros -= {root, *self._aliases[root]}  # what is there now would count on every rank
            return
        source = root not in self.ops
        if source and state is not State.V:
            raise Refused(op, "a rank's share would be written into a tensor of the model")
        for name in () if source else [root, *self._aliases[root]]:
            self._zeros.discard(name)
            self.trainable[name] = self.trainable[name] or self.trainable[op.name]
            if state is State.P:
                if self.states[name] is State.S:
                    raise Refused(op, "a partial sum would be written into a cut tensor", [name])
                self.states[name] = State.P
                self.origins[name] = self.origins.get(name, set()) | self.origins[op.name]
            elif self.states[name] is State.R:
                self.states[name] = State.S if self.is_cut(name) else State.V

    def is_cut(self, value: str) -> bool:
        """Whether a value holds a cut dim."""
        return any((value, number) in self.live for number in range(max(1, len(self.factored.tensors(value)))))

    def is_float(self, name: str) -> bool:
        """Whether a value is a floating-point tensor."""
        meta = self.metas.get(name)
        return meta is not None and meta.is_float

    def contracts(self, op: Op) -> list[str]:
        """Return the kinds of the cut contractions of an op."""
        found = []
        for factor, kind in self.chosen.index.contracting.get(op.name, ()):
            # the rows of a table whose other user's result is gathered are cut all the same
            rows = kind == "lookup" and any(self.chosen.gathered_dim(name) == 0 for name in op.refs())
            if rows or count(factor, self.chosen.inner):
                found.append(kind)
        return found

    def joins_alone(self, op: Op) -> bool:
        """Whether the result of ``op`` could become V while another result of the same instruction stays whole."""
        others = self.alike.get(_instruction(op), ()) if op.site else ()
        return any(self.states[o.name] is State.R and not self.edges.get(o.name) for o in others)

    def edge(self, op: Op, name: str) -> None:
        """Note that a whole value is used on the ranks' shares: its gradient is partial along this edge."""
        if self.trainable.get(name) and all(known is not op for known in self.edges[name]):
            self.edges[name].append(op)

    # ---- partial sums
    def _partial(self, op: Op, states: Mapping[str, State]) -> None:
        """A contraction over a cut factor: each rank has a partial sum."""
        if State.P in states.values():
            made = self._made(states)
            raise Refused(op, "a partial sum would enter another sum", self._sums(states), sums=made)
        for name in states:
            if states[name] in (State.S, State.V) or not self.is_float(name):
                continue
            if name not in self.parameter_of:
                raise Refused(op, "a whole value would be added to a partial sum")
            self.first_rank[self.parameter_of[name]].add(op.name)
        self.states[op.name] = State.P
        self.origins[op.name] = {op.name}

    def _pass_partial(self, op: Op, states: Mapping[str, State]) -> None:
        partial = [name for name, state in states.items() if state is State.P]
        others = [name for name in states if states[name] is not State.P and self.is_float(name)]
        self.origins[op.name] = self._made(states)
        self.states[op.name] = State.P
        if any(states[name] is State.S for name in others):
            raise self._needs_sum(op, states)
        divides = op.target == "aten.div" and op.arguments.get("self") != Ref(partial[0])
        rounds = op.arguments.get("rounding_mode") is not None or not self._floats(op)
        alone = op.refs().count(partial[0]) == len(partial) == 1
        if op.target in HOMOGENEOUS and alone and not divides and not rounds:
            for name in others:
                self.edge(op, name)
            return
        # a number that is added or written would count on every rank
        number = any(isinstance(op.arguments.get(name), (int, float)) for name in ("other", "value"))
        if op.target not in ADDING or number:
            raise self._needs_sum(op, states)
        for name in others:
            if name in self._bias_of and states[name] is State.R:
                self.first_rank[self._bias_of[name]].add(op.name)
            elif name not in self._zeros:
                raise self._needs_sum(op, states)

    def _floats(self, op: Op) -> bool:
        """Whether an op's results are floating-point: sums that are rounded are not the rounded sum."""
        metas = op.result if isinstance(op.result, tuple) else (op.result,)
        return all(meta is None or meta.is_float for meta in metas)

    def _made(self, states: Mapping[str, State]) -> set[str]:
        """Return the ops whose sums the partial operands are made of."""
        return {o for name, state in states.items() if state is State.P for o in self.origins[name]}

    def _sums(self, states: Mapping[str, State]) -> list[str]:
        """Return the ops and operands of the sums that partial operands are made of."""
        made = self._made(states)
        return [*sorted(made), *(ref for o in sorted(made) for ref in self.ops[o].refs())]

    def _needs_sum(self, op: Op, states: Mapping[str, State]) -> Refused:
        what = op.target.split(".")[-1]
        why = f"{what} needs the whole sum, inside the module's own code"
        refused = Refused(op, why, sums=self._made(states))
        refused.values = self._sums(states)  # not the cuts of this op's other operands
        return refused

    # ---- parameters
    def grad_sums(self) -> dict[str, str]:
        """Return the whole parameters all of whose uses are in regions, with the reason.

        Raises:
            UsedBothWays: one is used on whole values too.
            Refused: one is a bias of a partial sum, and used elsewhere.
        """
        found: dict[str, str] = {}
        for value, fqn in self.parameter_of.items():
            if fqn in self.first_rank:
                self._check_first_rank(value, fqn)
                continue
            if value in self.entering:
                continue
            inside, outside = self._uses(value)
            if inside and outside:
                raise UsedBothWays(inside[0], value, fqn)
            if inside:
                where = f" ({inside[0].where})" if inside[0].where else ""
                found[fqn] = f"it works on each rank's share, so its gradient is partial{where}"
        return found

    def _check_first_rank(self, value: str, fqn: str) -> None:
        pending = [value]
        while pending:
            for user in self.users[pending.pop()]:
                if user.name in self.first_rank[fqn]:
                    continue
                if self._bias_of.get(user.name) != fqn:
                    raise Refused(user, f"{fqn} is a bias of a partial sum and used elsewhere too")
                pending.append(user.name)

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
            elif op.target not in SHAPED:
                outside.append(op)
        return inside, outside


def _instruction(op: Op) -> tuple[Any, ...]:
    return op.calls[-1:], op.site, op.target, op.arguments.get("1") if op.target == "getitem" else None


def agree_over_sites(flow: Flow) -> None:
    """In code followed with made-up values, one instruction must find and leave the same states every time it runs.

    Then any other way through that code, which is made of the same instructions, is right too.

    Raises:
        Refused: one does not.
    """
    for first, *others in flow.alike.values():
        known = _around(flow, first)
        for op in others:
            if _around(flow, op) != known:
                values = [one.name for one in flow.traced.ops if one.calls[-1:] == op.calls[-1:]]
                raise Refused(op, "its code works on whole and on cut values, as other values decide", values)


def _around(flow: Flow, op: Op) -> list[State]:
    """Return the states that an op finds its operands in, and the one that it leaves its result in."""
    return [*(_seen(flow, name) for name in op.refs()), flow.made.get(op.name) or _seen(flow, op.name)]


def _seen(flow: Flow, name: str) -> State:
    """Return a value's state; V is R where no gradient comes back."""
    state = flow.states[name]
    return State.R if state is State.V and not flow.trainable.get(name) else state


def _many(op: Op) -> list[Meta | None]:
    return list(op.result) if isinstance(op.result, tuple) else []
