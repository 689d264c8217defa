"""The source of a live function, as a syntax tree that is known to be what runs."""

from __future__ import annotations
import __future__

import ast
import linecache
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType, FunctionType

_FUTURES = 0
for _name in __future__.all_feature_names:
    _FUTURES |= getattr(__future__, _name).compiler_flag


class NoSource(Exception):
    """A function's source cannot be used: one sentence says why."""


@dataclass(frozen=True)
class Source:
    """A function's place in the tree of its file.

    Attributes:
        function: the live function, without decorators.
        node: its definition.
        classes: names of the classes around it, outermost first.
    """

    function: FunctionType
    node: ast.FunctionDef
    classes: tuple[str, ...]

    def nodes(self) -> Iterator[ast.expr]:
        """Yield every expression in the body."""
        for statement in self.node.body:
            yield from (node for node in ast.walk(statement) if isinstance(node, ast.expr))

    def at(self, line: int, column: int, text: str) -> ast.expr | None:
        """Return the expression that begins at a place and reads ``text``, or None."""
        return next(
            (n for n in self.nodes() if (n.lineno, n.col_offset) == (line, column) and unparsed(n) == text), None
        )


def unparsed(node: ast.expr) -> str:
    """Return an expression's text with its spaces normalised."""
    return ast.unparse(node)


def source_of(function: FunctionType) -> Source:
    """Return the source of a function.

    Raises:
        NoSource: there is none, or it is not what runs.
    """
    code = function.__code__
    text = _text(code.co_filename)
    for node, classes in _definitions(code.co_filename, text):
        first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
        if node.name == code.co_name and first == code.co_firstlineno:
            if not any(_alike(one, code) for one in _codes(code.co_filename, text)):
                raise NoSource(f"the source of {code.co_name} is not what runs")
            return Source(function, node, classes)
    raise NoSource(f"there is no source of {code.co_name}")


def definition(code: CodeType) -> ast.FunctionDef | None:
    """Return the definition that ``code`` was compiled from, or was written in; None where that is not known."""
    text = _text(code.co_filename)
    found = None
    for node, _ in _definitions(code.co_filename, text):
        first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
        if first <= code.co_firstlineno <= (node.end_lineno or 0):
            found = node  # the innermost comes last
    return found


def compiled(source: Source, node: ast.FunctionDef, extra: tuple[str, ...]) -> CodeType:
    """Compile a definition in the surroundings of the source's function; ``extra`` are further names it closes over."""
    code = source.function.__code__
    bare = ast.FunctionDef(**{**dict(ast.iter_fields(node)), "decorator_list": [], "returns": None})
    ast.copy_location(bare, node)
    names = [*code.co_freevars, *extra]
    nothing = ast.arguments(
        posonlyargs=[], args=[ast.arg(n) for n in names], kwonlyargs=[], kw_defaults=[], defaults=[]
    )
    outer: ast.stmt = ast.FunctionDef(name="_around", args=nothing, body=[bare], decorator_list=[])
    for name in reversed(source.classes):  # private names are mangled by the class around them
        outer = ast.ClassDef(name=name, bases=[], keywords=[], body=[outer], decorator_list=[])
    module = ast.fix_missing_locations(ast.Module([outer], []))
    found: CodeType = compile(module, code.co_filename, "exec", flags=code.co_flags & _FUTURES, dont_inherit=True)
    for name in (*source.classes, "_around", node.name):
        found = next(c for c in found.co_consts if isinstance(c, CodeType) and c.co_name == name)
    return found


def _text(filename: str) -> str:
    linecache.checkcache(filename)
    return "".join(linecache.getlines(filename))


@lru_cache(maxsize=64)
def _definitions(filename: str, text: str) -> tuple[tuple[ast.FunctionDef, tuple[str, ...]], ...]:
    """Return every function of a file with the classes around it."""
    try:
        return tuple(_inside(ast.parse(text, filename), ()))
    except SyntaxError:  # a notebook's cell with magics, a file that is being written
        return ()


@lru_cache(maxsize=64)
def _codes(filename: str, text: str) -> tuple[CodeType, ...]:
    """Return the code of every function of a file, compiled as import does."""
    found = [compile(text, filename, "exec", dont_inherit=True)]
    for code in found:
        found += [const for const in code.co_consts if isinstance(const, CodeType)]
    return tuple(found)


def _inside(node: ast.AST, classes: tuple[str, ...]) -> Iterator[tuple[ast.FunctionDef, tuple[str, ...]]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef):
            yield child, classes
            yield from _inside(child, classes)
        else:
            yield from _inside(child, (*classes, child.name) if isinstance(child, ast.ClassDef) else classes)


def _alike(one: CodeType, two: CodeType) -> bool:
    """Whether two codes do the same, nested ones too."""
    same = ("co_name", "co_firstlineno", "co_code", "co_names", "co_varnames", "co_freevars")
    if any(getattr(one, name) != getattr(two, name) for name in same) or len(one.co_consts) != len(two.co_consts):
        return False
    for a, b in zip(one.co_consts, two.co_consts, strict=True):
        if isinstance(a, CodeType) and isinstance(b, CodeType):
            if not _alike(a, b):
                return False
        elif a != b or type(a) is not type(b):
            return False
    return True
