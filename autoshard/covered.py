"""Whether one run of a function went through all of its code: then what the run shows holds for every path.

Code that a run passed over may be passed over for good where no value of a tensor decides it, as elsewhere in a trace:
the test reads settings, or ran before the first question only. So may code that does nothing with tensors: it leaves a
loop, raises, or returns early what a later line returns too.
"""

from __future__ import annotations

import ast
import dis
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from types import CodeType, FrameType
from typing import Any

from autoshard.rewrite.sites import is_called_by_users
from autoshard.rewrite.source import definition

_DOES = ("CALL", "BINARY", "UNARY", "STORE", "RETURN_VALUE", "RETURN_CONST", "COMPARE", "FOR_ITER", "YIELD", "DELETE")
_Place = tuple[int, int, int, int]


class Coverage:
    """The instructions of the user's own functions that ran inside it, those of modules called left out.

    What must have run is a function that asked for a value of a tensor, one that called it, or was handed the answer:
    anywhere else a branch goes the same way whatever the values are.
    """

    def __init__(self) -> None:
        self.ran: dict[CodeType, set[int]] = {}
        self.asked: dict[CodeType, set[int]] = {}
        self.answers: set[int] = set()
        self.decides: set[CodeType] = set()
        self.late: dict[CodeType, set[int]] = {}

    def ask(self, place: tuple[CodeType, int] | None, answer: float) -> None:
        """Note what an instruction that asked for the value of a tensor was answered."""
        if place is not None:
            self.asked.setdefault(place[0], set()).add(place[1])
        if type(answer) is int:
            self.answers.add(answer)
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame is not self._start:
            self.decides.add(frame.f_code)
            self.late.setdefault(frame.f_code, set()).add(frame.f_lasti)  # what it makes has the answer in it
            frame = frame.f_back

    def __enter__(self) -> Coverage:
        """Watch what runs from here; a debugger or a measure of coverage is set aside for that long."""
        self._before, self._start = sys.gettrace(), sys._getframe(1)
        sys.settrace(self._enter)
        return self

    def __exit__(self, *_: object) -> None:
        """Watch no longer."""
        sys.settrace(self._before)

    def _enter(self, frame: FrameType, event: str, _: Any) -> Any:
        if not is_called_by_users(frame, self._start):
            return None
        ran, late = self.ran.setdefault(frame.f_code, {0}), self.late.setdefault(frame.f_code, set())
        if any(self._answered(value) for value in frame.f_locals.values()):
            self.decides.add(frame.f_code)

        def follow(frame: FrameType, event: str, _: Any) -> Any:
            if event == "opcode":
                ran.add(frame.f_lasti)
                if self.decides:
                    late.add(frame.f_lasti)
            return follow

        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return follow

    def _answered(self, value: Any) -> bool:
        if isinstance(value, (list, tuple)):
            return any(map(self._answered, value))
        return type(value) is int and value in self.answers

    def missed(self) -> bool:
        """Whether code that matters did not run; also where the source is not known."""
        decisive = [code for code in self.ran if code in self.decides]
        return any(self._missed(code) for code in decisive)

    def _missed(self, code: CodeType) -> bool:
        return _missed(code, self.ran[code], self.asked.get(code, set()), self.late[code])


def _missed(code: CodeType, ran: set[int], asked: set[int], late: set[int]) -> bool:
    every = list(dis.get_instructions(code))
    long = {two.offset for one, two in pairwise(every) if one.opname == "EXTENDED_ARG" and one.offset in ran}
    left = [one for one in every if one.offset not in ran | long and one.opname.startswith(_DOES)]
    if not left:
        return False
    node = definition(code)
    if node is None:
        return True

    def fixed(test: ast.expr) -> bool:
        inside = [one.offset for one in every if _within(one, _place(test))]
        early = any(n in ran for n in inside) and late.isdisjoint(inside)
        return (_fixed(test) or early) and asked.isdisjoint(inside)

    excused = list(_excused(node, fixed))
    return not all(any(_within(one, place) for place in excused) for one in left)


def _within(one: dis.Instruction, place: _Place) -> bool:
    at = one.positions
    if at is None or at.lineno is None or at.col_offset is None:
        return True  # made by the compiler
    return place[:2] <= (at.lineno, at.col_offset) and (at.end_lineno or 0, at.end_col_offset or 0) <= place[2:]


def _excused(function: ast.FunctionDef, fixed: Callable[[ast.expr], bool]) -> Iterator[_Place]:
    """Yield the stretches of a function that need not run; ``fixed`` says whether no tensor's values decide a test."""
    bound = [n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
    for node in ast.walk(function):
        if isinstance(node, (ast.Raise, ast.Continue, ast.Break, ast.Pass)):
            yield _place(node)
        elif isinstance(node, ast.Return) and isinstance(node.value, ast.Name):
            again = sum(isinstance(n, ast.Return) and _reads(n.value, node.value.id) for n in ast.walk(function))
            if again > 1 and bound.count(node.value.id) == 1:  # one object, whatever is written into it
                yield _place(node)
        elif isinstance(node, ast.Assert) and node.msg is not None:
            yield _place(node.msg)
        elif isinstance(node, (ast.If, ast.IfExp)) and fixed(node.test):
            for arm in (node.body, node.orelse):
                yield from map(_place, arm if isinstance(arm, list) else [arm])
        elif isinstance(node, ast.BoolOp):
            yield from (_place(two) for one, two in pairwise(node.values) if fixed(one))


def _place(node: ast.AST) -> _Place:
    return node.lineno, node.col_offset, node.end_lineno, node.end_col_offset  # type: ignore[attr-defined]


def _reads(node: ast.expr | None, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _fixed(test: ast.expr) -> bool:
    """Whether a test reads settings of the module only, or asks whether something was given."""
    if isinstance(test, ast.Constant):
        return True
    if isinstance(test, ast.Attribute):
        return test.value.id == "self" if isinstance(test.value, ast.Name) else _fixed(test.value)
    if isinstance(test, ast.Call):
        name = isinstance(test.func, ast.Name) or _fixed(test.func)
        return name and all(map(_fixed, (*test.args, *(k.value for k in test.keywords))))
    if isinstance(test, ast.UnaryOp):
        return _fixed(test.operand)
    if isinstance(test, ast.BoolOp):
        return all(map(_fixed, test.values))
    if isinstance(test, ast.Compare):
        asked = all(isinstance(op, (ast.Is, ast.IsNot)) for op in test.ops)
        return asked or all(map(_fixed, (test.left, *test.comparators)))
    return False
