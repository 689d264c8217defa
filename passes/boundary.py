"""Where values change state: conversions on the arguments and answers of module calls.

A whole value enters a region (R->V) where a module takes or returns it and uses it in regions only. Where no such
place is, the region grows: backwards over the op that made the value, forwards over its other uses, as long as
that repeats no matrix product. A partial sum is reduced (P->R) at the innermost module that returns it. What is left
is converted inside the module's code, at the text of a call or of its argument, if that is known.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from autoshard.ir import Call, Op, Ref
from autoshard.passes.flow import Flow
from autoshard.passes.inside import Inside
from autoshard.passes.outward import Outward
from autoshard.passes.rules import HOMOGENEOUS, SHAPED
from autoshard.passes.states import Conversion, Refused, State

_ANY = 1 << 30
_PARTIAL = "its gradient is a partial sum on each rank"


@dataclass
class Boundaries:
    """Places conversions for the states of a flow.

    Attributes:
        flow: the states.
        texts: where values can be converted inside a module's code, or None where that was not looked for yet.
        exits: ops whose partial sums are reduced right there.
    """

    flow: Flow
    texts: Inside | None = None
    exits: frozenset[str] = frozenset()
    conversions: list[Conversion] = field(default_factory=list)
    lookups: dict[str, str] = field(default_factory=dict)
    out: Outward = field(init=False)
    _done: dict[str, int] = field(default_factory=dict)  # edges of a value when its entry was placed: they only grow

    def __post_init__(self) -> None:
        self.out = Outward(self.flow)

    # ---- where values leave regions
    def leave(self, op: Op) -> None:
        """Make the result of ``op`` whole where a module returns it.

        Raises:
            Refused: a cut value has to be made whole inside a module's own code.
        """
        flow = self.flow
        gathered = flow.chosen.gathered_dim(op.name) if op.name in flow.chosen.ends else None
        if flow.states[op.name] is State.S and gathered is not None:
            rank = len(flow.factored.single(op.name))
            kind, why = f"S({gathered - rank})->R", "what follows needs it whole"
        elif flow.states[op.name] is State.P:
            kind, why = "P->R", "each rank has a part of the sum"
            if "mean" in flow.contracts(op):
                self._average(op)
                return
            if "lookup" in flow.contracts(op):
                self._look_up(op)
        else:
            return
        if op.name in self.exits and (self._leave_into(op) or self._convert_inside(op, op.name, kind, why)):
            flow.states[op.name] = State.R
            return
        if kind == "P->R" and self.out.left_further_out(op):
            return
        for call, path in self.out.returned_by(op):
            if not self._left_to_code(op, call):
                self._convert(call, "outputs", path, kind, op.name, why)
            elif not self._convert_inside(op, op.name, kind, why):
                raise Refused(op, "code that the trace did not run may use it before the model returns it", inside=True)
            flow.states[op.name] = State.R
            return
        if kind == "P->R" and "lookup" not in flow.contracts(op) and self._leave_into(op):
            return
        if gathered is not None:
            if not self._convert_inside(op, op.name, kind, why):
                raise Refused(op, "it would have to be gathered inside the module's own code", inside=True)
            flow.states[op.name] = State.R
        elif not flow.users[op.name] and op.name not in flow.returned:
            raise Refused(op, "the partial sum is returned by no module", flow.origins.get(op.name, ()))

    def _left_to_code(self, op: Op, call: Call) -> bool:
        """Whether what the model returns is made in code that may do more with it than the trace saw: a loss, say.

        A module that calls others and makes the value itself may, given labels, use it before it returns it, if its
        code has branches. A module that calls none, such as a head, is taken to do no more than what it did.
        """
        own = call.id == op.calls[-1] and op.name in self.flow.returned
        if not own or not any(other.parent == call.id for other in self.flow.calls.values()):
            return False
        return self.texts is None or call.fqn not in self.texts.straight

    def _average(self, op: Op) -> None:
        """Make a mean of the ranks' means right where it is made: it cannot be added to sums."""
        why = "each rank has the mean of its share"
        found = next(iter(self.out.returned_by(op)), None)
        if found is not None:
            self._convert(found[0], "outputs", found[1], "A->R", op.name, why)
        elif not self._convert_inside(op, op.name, "A->R", why):
            raise Refused(op, "a mean needs it whole, inside the module's own code", inside=True)
        self.flow.states[op.name] = State.R

    def _leave_into(self, op: Op) -> bool:
        """Reduce a partial sum where it enters the one module call that uses it, if a reduction is due there."""
        found = self.only_taker(op)
        if found is None:
            return False
        if op.name not in self.exits and all(user.target in HOMOGENEOUS for user in self.flow.users[op.name]):
            return False  # it may pass through, and be reduced later
        self._convert(found[0], "inputs", found[1], "P->R", op.name, "each rank has a part of the sum")
        self.flow.states[op.name] = State.R
        return True

    def only_taker(self, op: Op) -> tuple[Call, str] | None:
        """Return the module call, and its argument, through which alone the result of ``op`` is used."""
        flow = self.flow
        users = flow.users[op.name]
        for call in flow.takers[op.name]:
            paths = [path for path, value in call.inputs.items() if value == op.name]
            once = flow.times_called[call.fqn] == len(paths) == 1
            if once and call.id not in op.calls and all(call.id in user.calls for user in users):
                return call, paths[0]
        return None

    def _look_up(self, op: Op) -> None:
        flow = self.flow
        rows = op.arguments.get("indices")
        name = rows.name if isinstance(rows, Ref) else ""
        call = flow.calls[op.calls[-1]] if op.calls else None
        path = next((p for p, v in call.inputs.items() if v == name), None) if call else None
        if call is None or path is None or any(u is not op and call.id in u.calls for u in flow.users[name]):
            raise Refused(op, "the rows of the table are picked in the module's own code, not by its argument")
        if self.lookups.setdefault(call.fqn, path) != path:
            raise Refused(op, "the table is called with its row numbers in different arguments")

    def _convert(
        self, call: Call, side: str, path: str, kind: str, value: str, why: str, share: str | None = None
    ) -> None:
        self.conversions.append(Conversion(call.id, call.fqn, side, path, kind, value, why, share))

    def _convert_inside(self, op: Op, value: str, kind: str, why: str, share: str | None = None) -> bool:
        """Convert a value at the text through which ``op`` makes it, or is given it; say whether that is known."""
        if self.texts is None or not op.calls:
            return False
        text = self.texts.result(op) if value == op.name else self.texts.argument(op, value)
        if text is None:
            return False
        call = self.flow.calls[op.calls[-1]]
        self.conversions.append(Conversion(call.id, text.module, "inside", "", kind, value, why, share, text))
        return True

    # ---- where values enter regions
    def enter_all(self) -> None:
        """Place every entry, from the last value to the first: where a region grows backwards, earlier edges join it.

        Raises:
            Refused: a region begins inside a module's own code.
        """
        flow = self.flow
        while True:
            edges = ((v, len(ops)) for v, ops in flow.edges.items() if v not in flow.weights)
            pending = [v for v, number in edges if number != self._done.get(v, 0)]
            if not pending:
                return
            value = max(pending, key=lambda name: flow.order.get(name, -1))
            self._forget(value)
            self._done[value] = len(flow.edges[value])
            self._enter(value)

    def _forget(self, value: str) -> None:
        """Take back the entries of a value."""
        kept = [c for c in self.conversions if c.value != value or c.kind != "R->V"]
        wholes = [replace(c, kind=c.kind[:-1] + "R") if c.value == value and c.kind[-1] == "V" else c for c in kept]
        self.conversions = wholes

    def _enter(self, value: str) -> None:
        """Put ``R->V`` on the arguments through which a value reaches its uses in regions, and only those."""
        if self.flow.states[value] is State.V:
            return
        ops = self.flow.edges[value]
        names = {op.name for op in ops}
        if self._laid_out_from_argument(value, names) and self._grow(value, names, through=1):
            return
        entries: dict[tuple[int, str], None] = {}
        left: list[Op] = []
        for op in ops:
            found = self._entry(value, op, names)
            if found is None:
                if self._grow(value, names, through=1):
                    return
                left.append(op)
                continue
            entries.update(found)
        share = None
        if len(entries) + len(left) > 1:
            first = next((f"{self.flow.calls[n].fqn}:{path}" for n, path in entries), left[0].name if left else "")
            share = first
        for number, path in entries:
            self._convert(self.flow.calls[number], "inputs", path, "R->V", value, _PARTIAL, share)
        before = list(self.conversions)
        for op in left:
            if not self._convert_inside(op, value, "R->V", _PARTIAL, share):
                self.conversions = before
                if self.texts is not None and self._grow(value, names, through=_ANY):
                    self._forget(value)
                    return
                raise Refused(op, "the region begins inside the module's own code", [value], inside=True)

    def _laid_out_from_argument(self, value: str, names: set[str]) -> bool:
        """Whether a value used in regions only is an argument of the module whose code gives it another rank."""
        flow = self.flow
        made = flow.ops.get(value)
        if made is None or not made.calls or not self.out.lays_out(made):
            return False
        (given,) = made.refs()
        ranks = {len(flow.factored.single(name)) for name in (value, given)}
        inside = [user for user in flow.users[value] if user.target not in SHAPED]
        taken = given in flow.calls[made.calls[-1]].inputs.values()
        return taken and len(ranks) == 2 and all(user.name in names for user in inside)

    def _entry(self, value: str, op: Op, names: set[str]) -> dict[tuple[int, str], None] | None:
        """Return the outermost call around ``op`` that takes the value and uses it nowhere but in regions."""
        for number in op.calls:
            call = self.flow.calls[number]
            paths = [path for path, taken in call.inputs.items() if taken == value]
            inside = [user for user in self.flow.users[value] if number in user.calls and user.target not in SHAPED]
            if paths and all(user.name in names for user in inside) and value not in call.outputs.values():
                return {(number, path): None for path in paths}
        return None

    def _grow(self, value: str, names: set[str], through: int) -> bool:
        """Let all other uses of a value join the region, then enter where it is returned, or before it was made.

        Going back over an op of many operands takes as many conversions: at most ``through`` here.
        """
        flow = self.flow
        made = flow.ops.get(value)
        joining = self._others(value, names)
        if made is None or value in flow.returned or joining is None:
            return False
        if self.texts is not None and self.texts.may_be_passed_by(made, (flow.ops[name] for name in names)):
            return False
        whole = next((i for i, c in enumerate(self.conversions) if c.value == value and c.kind[-1] == "R"), None)
        source = next(iter(self.out.returned_by(made)), None)
        if whole is None and source is None and not self._may_join(made):
            return False
        inside = {value, *(op.name for op in joining)}
        more = {name for op in joining for name in self._operands(op)} - inside
        if len(more) + (1 if whole is not None or source is not None else len(self._operands(made))) > through:
            return False
        if any(flow.joins_alone(op) for op in ((made, *joining) if whole is None and source is None else joining)):
            return False
        for op in joining:
            self._join(op)
        if whole is not None:  # what is made whole becomes V at once
            c = self.conversions[whole]
            self.conversions[whole] = replace(c, kind=c.kind[:-1] + "V", why=f"{c.why}; {_PARTIAL}")
        elif source is not None:
            self._convert(source[0], "outputs", source[1], "R->V", value, _PARTIAL)
        else:
            self._join(made)
        return True

    def _others(self, value: str, names: set[str]) -> list[Op] | None:
        """Return the ops, forward from the value's uses outside regions, that have to join; None if one cannot."""
        flow = self.flow
        found: dict[str, Op] = {}
        pending = [value]
        while pending:
            one = pending.pop()
            if one in flow.returned:
                return None
            for user in flow.users[one]:
                known = names if one == value else {op.name for op in flow.edges.get(one, ())}
                if user.name in known or user.name in found or user.target in SHAPED:
                    continue
                if flow.states[user.name] is not State.R or not flow.trainable[user.name]:
                    continue
                if not self._may_join(user):
                    return None
                found[user.name] = user
                pending.append(user.name)
        return list(found.values())

    def _may_join(self, op: Op) -> bool:
        """Whether an op may work on V values: any may, but a matrix product there would be summed over ranks."""
        flow = self.flow
        if op.mutates or flow.states[op.name] is not State.R or op.name in flow.returned:
            return False
        for name in op.refs():
            meta = flow.metas.get(name)
            if flow.trainable.get(name) and name in flow.weights and (meta is None or len(meta.shape) > 1):
                return False
            if flow.trainable.get(name) and flow.states[name] not in (State.R, State.V):
                return False
        return not any(c.value == op.name and c.kind[-1] == "R" for c in self.conversions)

    def _operands(self, op: Op) -> set[str]:
        """Return the activations of an op that would have to enter in its place."""
        flow = self.flow
        whole = (n for n in op.refs() if flow.states[n] is State.R and n not in flow.weights)
        return {name for name in whole if flow.trainable.get(name)}

    def _join(self, op: Op) -> None:
        """Make the result of ``op`` V: what enters instead is what it reads."""
        flow = self.flow
        flow.states[op.name] = State.V
        self._forget(op.name)
        for name in dict.fromkeys(op.refs()):
            if flow.states[name] is State.R:
                flow.edge(op, name)

    # ---- repeated calls
    def agree_over_calls(self) -> None:
        """A hook acts on every call of its module: all of them must want the same conversions.

        Raises:
            Refused: they do not.
        """
        flow = self.flow
        by_call: dict[int, set[tuple[str, str, str]]] = {}
        for c in self.conversions:
            if c.side != "inside":
                by_call.setdefault(c.call, set()).add((c.side, c.path, c.kind))
        wanted: dict[str, set[tuple[str, str, str]]] = {}
        for c in self.conversions:
            if c.side != "inside":
                wanted.setdefault(c.fqn, set()).update(by_call[c.call])
        for call in flow.traced.calls:
            missing = wanted.get(call.fqn, set()) - by_call.get(call.id, set())
            if all(self._harmless(call, *one) for one in missing):
                continue
            values = [*call.inputs.values(), *call.outputs.values()]
            op = next((o for o in flow.traced.ops if call.id in o.calls), flow.traced.ops[0])
            values += [c.value for c in self.conversions if c.fqn == call.fqn]
            raise Refused(op, f"{call.fqn or 'the model'} is called several times in different ways", values)

    def agree_over_texts(self) -> None:
        """A text is converted every time its line runs: all ops it stands for must want that.

        Raises:
            Refused: they do not.
        """
        inside = [c for c in self.conversions if c.side == "inside"]
        texts = {c.text: c for c in inside}
        if self.texts is None:
            return
        if len({(c.text, c.kind) for c in inside}) != len(texts):
            op = self.flow.ops[inside[0].value]
            raise Refused(op, "one line would need two conversions", [c.value for c in inside])
        done = {(c.text, c.value) for c in inside}
        for op in self.flow.traced.ops if inside else ():
            for value in (op.name, *op.refs()):
                text = self.texts.result(op) if value == op.name else self.texts.argument(op, value)
                if text not in texts or (text, value) in done:
                    continue
                if texts[text].kind != "R->V" or self.flow.trainable.get(value):
                    raise Refused(op, "one line would need two conversions", [value, texts[text].value])

    def _harmless(self, call: Call, side: str, path: str, kind: str) -> bool:
        """Whether a conversion that a call does not need does nothing there: no gradient comes back."""
        value = (call.inputs if side == "inputs" else call.outputs).get(path)
        return kind == "R->V" and (value is None or not self.flow.trainable.get(value))
