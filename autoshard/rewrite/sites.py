"""Where in the user's source a call is, whose code it is, and how each of its arguments is written."""

from __future__ import annotations

import ast
import dis
import inspect
import itertools
import os
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

import torch
from torch import nn

from autoshard.rewrite.functions import innermost, method, named
from autoshard.rewrite.given import is_function, operands, parameters
from autoshard.rewrite.source import NoSource, Source, source_of, unparsed

_OURS = (str(Path(torch.__file__).parent), str(Path(__file__).parent.parent))
_NOT_USERS = (*_OURS, sysconfig.get_path("stdlib") + os.sep, "<")
_CALL = nn.Module._call_impl.__code__
_NESTED = ("<genexpr>", "<listcomp>", "<setcomp>", "<dictcomp>", "<lambda>")


@dataclass(frozen=True)
class Written:
    """How one number that a call is given is written.

    Attributes:
        module: the module that owns the code.
        function: the method, and the functions on the way; see ``CallRewrite``.
        where: ``file:line`` of the text.
        column: where the text begins.
        text: the expression, spaces normalised.
        item: the number's place where the text is a sequence, else None.
        items: how long that is.
    """

    module: str
    function: str
    where: str
    column: int
    text: str
    item: int | None = None
    items: int = 0


@dataclass(frozen=True)
class Site:
    """A call in a function that one module can have its own copy of.

    Attributes:
        node: the call, the subscript, or the operator with its two operands.
        is_function: whether the call names a function of a module or class: then it is given the tensor as well.
        operands: those of an operator, in the order in which torch is given them; none where that is not clear.
        parameters: those of a function written in Python that hands itself over with other arguments by name than it
            was given, ``F.layer_norm`` for one; none of other calls.
        arms: the arms of branches that it is in, each as line and column of the first statement: another run may not
            come there.
    """

    module: str
    function: str
    file: str
    node: ast.Call | ast.Subscript | ast.BinOp
    is_function: bool
    operands: tuple[ast.expr, ...] = ()
    parameters: tuple[str, ...] = ()
    arms: frozenset[tuple[int, int]] = frozenset()

    def written(self, count: int, path: tuple[Any, ...]) -> Written | None:
        """Return how an argument is written, or None where that is not clear.

        Args:
            count: how many positional arguments the op got, the tensor of a method included.
            path: its place or name, and the place in it where it is a sequence: ``(1,)``, ``("size", 2, 3)`` for
                item 2 of 3.
        """
        node = self._argument(count, path[0])
        if node is None:
            return None
        items = path[1:] if len(path) > 1 else None
        if isinstance(node, tuple):  # an item of a starred argument
            node, items = node[0], node[1:]
        return self._item(node, items)

    def _argument(self, count: int, place: int | str) -> Any:
        if isinstance(self.node, ast.Subscript):
            return _bound(self.node.slice, str(place))
        if isinstance(self.node, ast.BinOp):
            return next((one for number, one in enumerate(self.operands) if number == place), None)
        if self.parameters and not any(isinstance(one, ast.Starred) for one in self.node.args):
            name = self.parameters[place] if isinstance(place, int) and place < len(self.parameters) else place
            given = dict(zip(self.parameters, self.node.args, strict=False))
            given |= {k.arg: k.value for k in self.node.keywords if k.arg is not None}
            return given.get(str(name))
        if isinstance(place, str):
            return next((k.value for k in self.node.keywords if k.arg == place), None)
        skipped = 0 if self.is_function else 1
        return _nth(self.node.args, place - skipped, count - skipped)

    def _item(self, node: ast.expr, items: Any) -> Written | None:
        if items is not None:
            item, number = items
            if isinstance(node, (ast.Tuple, ast.List)):
                found = _nth(node.elts, item, number)
                return (
                    self._item(found[0], found[1:]) if isinstance(found, tuple) else found and self._item(found, None)
                )
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add) and isinstance(node.right, ast.Tuple):
                last = len(node.right.elts) - (number - item)
                starred = any(isinstance(one, ast.Starred) for one in node.right.elts)
                return self._item(node.right.elts[last], None) if last >= 0 and not starred else None
            if not isinstance(node, (ast.Name, ast.Attribute)):
                return None  # evaluated once for each item, and that may do something
        where = f"{Path(self.file).name}:{node.lineno}"
        item, number = items if items is not None else (None, 0)
        return Written(self.module, self.function, where, node.col_offset, unparsed(node), item, number)


def _nth(nodes: list[ast.expr], place: int, count: int) -> Any:
    """Return the node of item ``place`` of ``count``; ``(node, item, items)`` where it comes out of a starred one."""
    stars = [i for i, node in enumerate(nodes) if isinstance(node, ast.Starred)]
    if not stars:
        return nodes[place] if len(nodes) == count and place < count else None
    if len(stars) > 1:
        return None
    star, behind = stars[0], len(nodes) - stars[0] - 1
    if place < star:
        return nodes[place]
    if place >= count - behind:
        return nodes[place - count]
    inner = nodes[star]
    assert isinstance(inner, ast.Starred)
    return inner.value, place - star, count - behind - star


def _bound(index: ast.expr, name: str) -> ast.expr | None:
    """Return the ``start`` or ``stop`` of the only slice in a subscript that has one."""
    every = index.elts if isinstance(index, ast.Tuple) else [index]
    slices = [one for one in every if isinstance(one, ast.Slice) and (one.lower or one.upper)]
    if len(slices) != 1:
        return None
    return slices[0].lower if name == "start" else slices[0].upper


class Sites:
    """Finds the sites of calls while the modules of a twin run."""

    def __init__(self, twin: nn.Module) -> None:
        self.names = {id(vars(module)): fqn for fqn, module in reversed(list(twin.named_modules()))}
        self.known: dict[Any, Site | None] = {}

    def here(self) -> Site | None:
        """Return the site of the call of torch that is running, or None where its code cannot be one module's own."""
        frame = _caller(sys._getframe(1))
        if frame is None:
            return None
        try:
            return self._site(frame)
        except NoSource:
            return None

    def _site(self, frame: FrameType) -> Site | None:
        place = _position(frame)
        found = self._owner(frame)
        if place is None or found is None:
            return None
        module, chain, function = found
        key = (id(vars(module)), chain, place)
        if key not in self.known:
            name = self.names.get(id(vars(module)))
            source = source_of(function)
            node = _ending(source, place)
            self.known[key] = (
                None
                if node is None or name is None
                else Site(
                    name,
                    " > ".join(chain),
                    function.__code__.co_filename,
                    node,
                    is_function(node, frame),
                    operands(node, frame),
                    parameters(node, frame),
                    _arms(source.node, node),
                )
            )
        return self.known[key]

    def _owner(self, frame: FrameType) -> tuple[nn.Module, tuple[str, ...], FunctionType] | None:
        """Return the module whose method the frame is in, or leads to by plain names, and the function it is in."""
        return next((found for body in _bodies(frame) for found in [self._direct(body)] if found is not None), None)

    def _direct(self, frame: FrameType) -> tuple[nn.Module, tuple[str, ...], FunctionType] | None:
        code = frame.f_code
        first = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        if isinstance(first, nn.Module):
            for name in _names(first, code.co_name):
                function = innermost(method(first, name))
                if function is not None and function.__code__ is code:
                    return first, (name,), function
        caller = frame.f_back
        above = None if caller is None or caller.f_code.co_filename.startswith(_OURS) else self._owner(caller)
        if above is None or caller is None:
            return None
        module, chain, outer = above
        called = _called(_ending(source_of(outer), _position(caller)), outer)
        if called is None:
            return None
        name, function = called
        return (module, (*chain, name), function) if function.__code__ is code else None


def _names(module: nn.Module, name: str) -> list[str]:
    """Return what a method may be called in its class: private names have the class's in front."""
    if not name.startswith("__") or name.endswith("__"):
        return [name]
    return [f"_{kind.__name__.lstrip('_')}{name}" for kind in type(module).__mro__]


def _caller(frame: FrameType | None) -> FrameType | None:
    """Return the nearest frame of the user's; None where a module of torch stands between."""
    while frame is not None and frame.f_code.co_filename.startswith(_OURS):
        if frame.f_code is _CALL:
            return None
        frame = frame.f_back
    return frame


def is_straight(module: nn.Module) -> bool:
    """Whether a module's ``forward`` is torch's or ours, or has no branch; not where its source is not known."""
    function = innermost(method(module, "forward"))
    if function is None:
        return False
    if function.__code__.co_filename.startswith(_OURS):
        return True
    try:
        node = source_of(function).node
    except NoSource:
        return False
    return not any(isinstance(one, (ast.If, ast.IfExp, ast.Match, ast.Try)) for one in ast.walk(node))


def is_called_by_users(frame: FrameType, start: FrameType) -> bool:
    """Whether a frame is the user's and below ``start`` by calls of the user's code, none of them of a module."""
    if frame.f_code.co_filename.startswith(_NOT_USERS):
        return False
    above = frame.f_back
    while above is not None and above is not start:
        code = above.f_code
        # torch.no_grad and its like call what they decorate
        if code.co_filename.startswith(_NOT_USERS) and code.co_name != "decorate_context":
            return False
        above = above.f_back
    return above is start


def users_place() -> tuple[CodeType, int] | None:
    """Return the instruction of the user's code that the running call comes from; None behind a module of torch."""
    frame = _caller(sys._getframe(1))
    return None if frame is None else (frame.f_code, frame.f_lasti)


@dataclass(frozen=True)
class _Place:
    """Where the running instruction is written.

    Attributes:
        kinds: the kinds of expressions that it may run.
        end: line and column.
        start: the same; None for a call, whose start is not reliable where a chain of calls runs over lines.
    """

    kinds: tuple[type[ast.expr], ...]
    end: tuple[int, int]
    start: tuple[int, int] | None = None


def _position(frame: FrameType) -> _Place | None:
    """Return where the running instruction is written, if it is a call, a subscript or an operator of two operands."""
    found = next(itertools.islice(frame.f_code.co_positions(), frame.f_lasti // 2, None), (None,) * 4)
    first, last, begin, final = found
    if first is None or last is None or begin is None or final is None:
        return None
    name = _opcode(frame)
    # an operator may end with a call, ``x + f(y)``, and a call with an operator: the instruction says which it is
    if "CALL" in name:
        return _Place((ast.Call,), (last, final))
    if "SUBSCR" in name or "SLICE" in name:
        return _Place((ast.Subscript,), (last, final))
    # newer Pythons run a subscript as an operator too
    return _Place((ast.BinOp, ast.Subscript), (last, final), (first, begin)) if name == "BINARY_OP" else None


def _opcode(frame: FrameType) -> str:
    """Return the name of the running instruction; a frame that runs Python below may stand in the caches behind it."""
    code, place = frame.f_code.co_code, frame.f_lasti
    while place > 0 and dis.opname[code[place]] == "CACHE":
        place -= 2
    return dis.opname[code[place]]


def _arms(function: ast.AST, node: ast.expr) -> frozenset[tuple[int, int]]:
    found = set()
    for branch in (one for one in ast.walk(function) if isinstance(one, ast.If)):
        for arm in (arm for arm in (branch.body, branch.orelse) if arm):
            first, last = (arm[0].lineno, arm[0].col_offset), (arm[-1].end_lineno or 0, arm[-1].end_col_offset or 0)
            if first <= (node.lineno, node.col_offset) <= last:
                found.add(first)
    return frozenset(found)


def _bodies(frame: FrameType) -> Iterator[FrameType]:
    """Yield the frame, unless a comprehension's, and those of the functions that its code is written in."""
    inner: FrameType | None = frame
    while inner is not None:
        if inner.f_code.co_name not in _NESTED:
            yield inner
        outer = inner.f_back
        while outer is not None and not _holds(outer.f_code, inner.f_code):
            outer = outer.f_back
        inner = outer


def _holds(outer: CodeType, inner: CodeType) -> bool:
    """Whether ``inner`` is written in the function ``outer``."""
    return bool(outer.co_flags & inspect.CO_OPTIMIZED) and any(const is inner for const in outer.co_consts)


def _ending(source: Source, place: _Place | None) -> Any:
    """Return the call, subscript or operator that is written at a place."""
    if place is None:
        return None
    for node in source.nodes():
        starts = place.start in (None, (node.lineno, node.col_offset))
        if starts and isinstance(node, place.kinds) and (node.end_lineno, node.end_col_offset) == place.end:
            return node
    return None


def _called(node: Any, function: FunctionType) -> tuple[str, FunctionType] | None:
    """Return the function that a call means by a plain name that is no local of the caller."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        return None
    name = node.func.id
    code = function.__code__
    if name in code.co_varnames or name in code.co_cellvars:
        return None
    found = innermost(named(function, name))
    return None if found is None else (name, found)
