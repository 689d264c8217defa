"""Code that asks for the number of a block: what it does for one it may not do for another.

Blocks that are not traced are taken to repeat those that are. A loop over them that does something more at number 5,
or a block that does so by a number that it holds, would be seen only where block 5 is traced.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch import nn

from autoshard.rewrite.functions import innermost
from autoshard.rewrite.source import definition

_TORCH = str(Path(torch.__file__).parent) + os.sep

_BRANCHES = (ast.If, ast.IfExp, ast.While)


def loops_by_number(module: nn.Module) -> bool:
    """Whether code of a module has a loop with a branch whose test reads the loop's number."""
    kind: Any = type(module)  # its hash is that of any class, which mypy takes for the module's own
    return _loops_by_number(kind)


def attributes_in_branches(module: nn.Module) -> frozenset[str]:
    """Return the names of attributes of ``self`` that tests in a module's code read, but for ``is None``."""
    kind: Any = type(module)
    return _attributes_in_branches(kind)


def handed_numbers(module: nn.Module) -> frozenset[int | str]:
    """Return the places, or names, of the arguments in which code of a module hands a loop's number to what it calls.

    Counted are calls of what the loop runs over, and of items: ``block(x, i)``, ``self.blocks[i](x, number=i)``.
    """
    kind: Any = type(module)
    return _handed_numbers(kind)


def decides_by(module: nn.Module, handed: frozenset[int | str]) -> bool:
    """Whether a module's ``forward`` decides by an argument handed to it, or hands it on, where others may."""
    kind: Any = type(module)
    return bool(handed) and _decides_by(kind, handed)


@lru_cache(maxsize=512)
def _handed_numbers(kind: Any) -> frozenset[int | str]:
    return frozenset(place for loop in _loops(kind) for place in _handed(loop, _numbers(loop)))


@lru_cache(maxsize=512)
def _decides_by(kind: Any, handed: frozenset[int | str]) -> bool:
    forward = next(_methods(kind), None)
    if forward is None:
        return False
    positional = [one.arg for one in (*forward.args.posonlyargs, *forward.args.args)][1:]
    names = {place if isinstance(place, str) else next(iter(positional[place : place + 1]), "") for place in handed}
    tests = [node.test for node in ast.walk(forward) if isinstance(node, _BRANCHES)]
    parts = [part for test in tests for part in _parts(test)]
    parts += [one for node in ast.walk(forward) if isinstance(node, ast.Call) for one in _arguments(node).values()]
    return any(isinstance(node, ast.Name) and node.id in names for part in parts for node in ast.walk(part))


@lru_cache(maxsize=512)
def _loops_by_number(kind: Any) -> bool:
    return any(_asks(loop, numbers) for loop in _loops(kind) if (numbers := _numbers(loop)))


@lru_cache(maxsize=512)
def _attributes_in_branches(kind: Any) -> frozenset[str]:
    tests = (node.test for body in _methods(kind) for node in ast.walk(body) if isinstance(node, _BRANCHES))
    return frozenset(
        node.attr
        for test in tests
        for part in _parts(test)
        for node in ast.walk(part)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
    )


def _loops(kind: type[nn.Module]) -> Iterator[ast.For | ast.While]:
    for body in _methods(kind):
        yield from (node for node in ast.walk(body) if isinstance(node, (ast.For, ast.While)))


def _methods(kind: type[nn.Module]) -> Iterator[ast.FunctionDef]:
    """Yield the definitions of the user's ``forward`` and of the methods that it leads to."""
    pending, seen = ["forward"], {"forward"}
    while pending:
        name = pending.pop()
        for value in [vars(one)[name] for one in kind.__mro__ if name in vars(one)]:
            function = innermost(value)
            if function is None or function.__code__.co_filename.startswith(_TORCH):
                continue
            found = definition(function.__code__)
            if found is None:
                continue
            yield found
            named = {node.attr for node in ast.walk(found) if isinstance(node, ast.Attribute)} - seen
            seen |= named
            pending += [one for one in sorted(named) if isinstance(getattr(kind, one, None), FunctionType)]


def _numbers(loop: ast.For | ast.While) -> set[str]:
    """Return the names that count a loop: by ``enumerate`` or ``range``, or added to in it."""
    found = {
        node.target.id
        for node in ast.walk(loop)
        if isinstance(node, ast.AugAssign)
        and isinstance(node.target, ast.Name)
        and isinstance(node.value, ast.Constant)
    }
    if isinstance(loop, ast.For) and isinstance(loop.iter, ast.Call) and isinstance(loop.iter.func, ast.Name):
        first = loop.target.elts[0] if isinstance(loop.target, ast.Tuple) else loop.target
        if loop.iter.func.id in ("enumerate", "range") and isinstance(first, ast.Name):
            found.add(first.id)
    return found


def _asks(loop: ast.For | ast.While, numbers: set[str]) -> bool:
    """Whether a branch in the loop reads one of its numbers."""
    tests = (node.test for body in loop.body for node in ast.walk(body) if isinstance(node, _BRANCHES))
    parts = (part for test in tests for part in _parts(test))
    return any(isinstance(node, ast.Name) and node.id in numbers for part in parts for node in ast.walk(part))


def _handed(loop: ast.For | ast.While, numbers: set[str]) -> Iterator[int | str]:
    """Yield the places and names of arguments that are one of the loop's numbers."""
    for call in (node for body in loop.body for node in ast.walk(body) if isinstance(node, ast.Call)):
        run = isinstance(call.func, ast.Subscript) or (isinstance(call.func, ast.Name) and call.func.id in _taken(loop))
        for place, value in _arguments(call).items() if run else ():
            if isinstance(value, ast.Name) and value.id in numbers:
                yield place


def _taken(loop: ast.For | ast.While) -> set[str]:
    """Return the names that a loop gives to what it runs over."""
    target = loop.target if isinstance(loop, ast.For) else ast.Tuple([])
    return {node.id for node in ast.walk(target) if isinstance(node, ast.Name)}


def _arguments(call: ast.Call) -> dict[int | str, ast.expr]:
    found: dict[int | str, ast.expr] = dict(enumerate(call.args))
    found.update({one.arg: one.value for one in call.keywords if one.arg is not None})
    return found


def _parts(test: ast.expr) -> Iterator[ast.expr]:
    """Yield the parts of a test that ``and``, ``or`` and ``not`` join, without those that only ask for None."""
    if isinstance(test, ast.BoolOp):
        for value in test.values:
            yield from _parts(value)
    elif isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        yield from _parts(test.operand)
    elif not (isinstance(test, ast.Compare) and all(isinstance(op, (ast.Is, ast.IsNot)) for op in test.ops)):
        yield test
