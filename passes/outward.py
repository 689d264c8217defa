"""Which ways out values have: the calls that return them, and sums that are better reduced further out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from autoshard.ir import Call, Op
from autoshard.passes.flow import Flow
from autoshard.passes.rules import HOMOGENEOUS, VIEWS
from autoshard.passes.states import State


@dataclass(frozen=True)
class Outward:
    """The ways of values out of the modules that make them."""

    flow: Flow

    def returned_by(self, op: Op) -> Iterator[tuple[Call, str]]:
        """Yield the calls, innermost first, that return a value no op inside them uses, each with the path."""
        flow = self.flow
        for number in reversed(op.calls):
            call = flow.calls[number]
            paths = [path for path, value in call.outputs.items() if value == op.name]
            if paths and not any(number in user.calls for user in flow.users[op.name]):
                for path in paths:
                    yield call, path

    def left_further_out(self, op: Op) -> bool:
        """Whether a sum that a module returns is left to one further out, that reshapes it or adds other sums to it.

        It costs no more there; several sums are reduced as one, and a stream of tokens has its sequence again.
        """
        flow = self.flow
        value, gained = op.name, False
        if "lookup" in flow.contracts(op) or not self._is_returned(op):
            return False
        while len(flow.users[value]) == 1 and value not in flow.returned:
            user = flow.users[value][0]
            adds = self._adds_sums(user)
            if not adds and not self.lays_out(user):
                return False
            gained = gained or adds or len(flow.factored.single(user.name)) != len(flow.factored.single(value))
            value = user.name
            if self._is_returned(user):
                return gained
        return False

    def lays_out(self, op: Op) -> bool:
        """Whether an op gives all elements of a value another shape."""
        metas = self.flow.metas
        sizes = [metas[name].numel for name in (op.name, *op.refs()) if name in metas]
        return op.target in VIEWS and len(sizes) == 2 and sizes[0] == sizes[1] and not op.mutates

    def _is_returned(self, op: Op) -> bool:
        return next(self.returned_by(op), None) is not None

    def _adds_sums(self, op: Op) -> bool:
        """Whether an op adds partial sums, each of which nothing else uses."""
        return op.target == "aten.add" and len(set(op.refs())) == 2 and all(map(self._is_sum, op.refs()))

    def _is_sum(self, value: str) -> bool:
        """Whether a value is a partial sum that is not reduced yet, or will be one; of one use."""
        flow = self.flow
        op = flow.ops.get(value)
        if op is None or len(flow.users[value]) != 1:
            return False
        return flow.states[value] is State.P if value in flow.states else self._makes_sum(op)

    def _makes_sum(self, op: Op) -> bool:
        """Whether an op that the walk has not come to will leave a partial sum."""
        flow = self.flow
        contracted = set(flow.contracts(op))
        if contracted:
            return contracted.isdisjoint({"mean", "lookup"})
        if self._adds_sums(op):
            return True
        given = [name for name in dict.fromkeys(op.refs()) if flow.is_float(name)]
        sums = [name for name in given if self._stays_sum(name)]
        if op.target not in HOMOGENEOUS or len(sums) != 1 or op.arguments.get("rounding_mode") is not None:
            return False
        return not any(flow.is_cut(name) for name in given if name not in sums)

    def _stays_sum(self, value: str) -> bool:
        """Whether a value is, or will be, a partial sum that no module reduces where it returns it."""
        op = self.flow.ops.get(value)
        if op is None or value in self.flow.states:
            return self.flow.states.get(value) is State.P
        return self._makes_sum(op) and not self._is_returned(op)
