"""Find the functions behind a module's methods, and make an edited copy of each for one instance."""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

from torch import nn

from autoshard.rewrite.record import CONVERT, CallRewrite
from autoshard.rewrite.source import NoSource, compiled, source_of

Convert = Callable[..., Any]


def unchanged(kind: str, value: Any, share: str | None = None) -> Any:
    """Convert nothing: what ``convert`` means where there is one rank."""
    return value


def method(module: nn.Module, name: str) -> Any:
    """Return what the module's class has under a name, with decorators; None where the instance has its own."""
    if name in vars(module):
        return None
    return next((vars(kind)[name] for kind in type(module).__mro__ if name in vars(kind)), None)


def named(function: FunctionType, name: str) -> Any:
    """Return what a name inside a function means, where it is no local: a closure's or a global value."""
    if name in function.__code__.co_freevars:
        cell = (function.__closure__ or ())[function.__code__.co_freevars.index(name)]
        try:
            return cell.cell_contents
        except ValueError:  # not assigned yet
            return None
    return function.__globals__.get(name)


def innermost(value: Any) -> FunctionType | None:
    """Return the function that decorators were put around."""
    if isinstance(value, staticmethod):
        value = value.__func__
    while isinstance(value, FunctionType) and hasattr(value, "__wrapped__"):
        value = value.__wrapped__
    return value if isinstance(value, FunctionType) else None


def prepare(module: nn.Module, rewrites: Sequence[CallRewrite], convert: Convert = unchanged) -> dict[str, Any]:
    """Return a module's own edited methods, by name; changes nothing.

    Args:
        module: the module.
        rewrites: what is written otherwise.
        convert: what ``convert`` means in a text that converts a value.

    Raises:
        NoSource: a function cannot be found, has no source, or does not read what a rewrite says.
    """
    found: dict[str, Any] = {}
    for name, tails in _by_head([(one.chain, one) for one in rewrites]).items():
        stacked = method(module, name)
        edited = _edited(stacked, tails, name, convert)
        # a pickle holds a method by its name: under the old one it would find the class's own, silently (``pickled``)
        edited.__name__ = f"{name} (rewritten for a rank)"
        found[name] = edited if isinstance(stacked, staticmethod) else MethodType(edited, module)
    return found


_Tails = list[tuple[tuple[str, ...], CallRewrite]]


def _by_head(chains: _Tails) -> dict[str, _Tails]:
    found: dict[str, _Tails] = {}
    for chain, one in chains:
        found.setdefault(chain[0], []).append((chain[1:], one))
    return found


def _edited(stacked: Any, tails: _Tails, name: str, convert: Convert) -> FunctionType:
    """Return a copy of a function, decorators and all, with its own edits and those of the functions it calls."""
    function = innermost(stacked)
    if function is None:
        raise NoSource(f"{name} is no function of the module's class")
    private: dict[str, Any] = {
        called: _edited(named(function, called), inner, called, convert)
        for called, inner in _by_head([(tail, one) for tail, one in tails if tail]).items()
    }
    own = [one for tail, one in tails if not tail]
    if any(one.converts for one in own):
        if CONVERT in function.__code__.co_varnames + function.__code__.co_freevars + function.__code__.co_names:
            raise NoSource(f"{name} has a {CONVERT} of its own")
        private[CONVERT] = convert
    made = _compiled(function, own, private)
    stacked = stacked.__func__ if isinstance(stacked, staticmethod) else stacked
    return _decorated(stacked, function, made)


def _compiled(function: FunctionType, rewrites: Sequence[CallRewrite], private: Mapping[str, Any]) -> FunctionType:
    source = source_of(function)
    texts = {}
    for one in rewrites:
        node = (
            source.at(one.line, one.column, one.before)
            if one.file == Path(function.__code__.co_filename).name
            else None
        )
        if node is None:
            raise NoSource(f"{one.where} has no {one.before!r} at column {one.column}")
        texts[_key(node)] = one.expression()
    code = function.__code__
    extra = tuple(name for name in private if name not in code.co_freevars)
    edited = compiled(source, _Edit(texts).visit(copy.deepcopy(source.node)), extra)
    cells: dict[str, CellType] = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
    cells.update({name: CellType(helper) for name, helper in private.items()})
    return _like(function, edited, tuple(cells[name] for name in edited.co_freevars))


def _like(function: FunctionType, code: CodeType, closure: tuple[CellType, ...]) -> FunctionType:
    """Return a function with the same globals, defaults and names."""
    made = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, closure)
    made.__kwdefaults__ = function.__kwdefaults__
    made.__annotations__ = function.__annotations__
    made.__qualname__ = function.__qualname__
    made.__module__ = function.__module__
    made.__doc__ = function.__doc__
    made.__dict__.update(function.__dict__)
    return made


def _decorated(stacked: Any, old: FunctionType, new: FunctionType) -> FunctionType:
    """Rebuild the decorators around ``old`` around ``new``.

    Raises:
        NoSource: a decorator does not hold what it wraps in its closure.
    """
    if stacked is old:
        return new
    inner = _decorated(stacked.__wrapped__, old, new)
    held = [cell.cell_contents is stacked.__wrapped__ for cell in stacked.__closure__ or ()]
    if not any(held):
        raise NoSource(f"a decorator of {old.__name__} hides what it calls")
    cells = tuple(CellType(inner) if hit else cell for hit, cell in zip(held, stacked.__closure__ or (), strict=True))
    made = _like(stacked, stacked.__code__, cells)
    made.__dict__["__wrapped__"] = inner
    return made


Key = tuple[int, int, int, int]


def _key(node: ast.expr) -> Key:
    return node.lineno, node.col_offset, node.end_lineno or 0, node.end_col_offset or 0


class _Edit(ast.NodeTransformer):
    def __init__(self, texts: Mapping[Key, ast.expr]) -> None:
        self.texts = texts

    def visit(self, node: ast.AST) -> Any:
        """Replace an expression at one of the places."""
        if isinstance(node, ast.expr) and _key(node) in self.texts and not isinstance(node, ast.Starred):
            new = copy.deepcopy(self.texts[_key(node)])
            if isinstance(new, ast.Call):  # what is converted keeps its own edits
                inside: Any = self.generic_visit(node)
                new.args[1] = inside
            for inner in ast.walk(new):
                ast.copy_location(inner, node)
            return new
        return self.generic_visit(node)
