"""What a plan says of an argument that is rewritten. Reading it needs no torch."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

#: The name that converts a value in a rewritten text: ``convert("R->V", x)``, and the name of a shared entry behind.
CONVERT = "convert"
#: The size that torch works out from how many elements there are.
INFERRED = "-1"
_ALLOWED = (ast.BinOp, ast.FloorDiv, ast.Tuple, ast.Starred, ast.Subscript, ast.Slice, ast.Load)


@dataclass(frozen=True)
class CallRewrite:
    """One expression in a module's own code, written otherwise for that module.

    Attributes:
        function: the method, such as ``forward``; or the method and the functions it calls by name, down to the one
            that holds the call, such as ``forward > split_heads``.
        where: ``file:line`` of the expression.
        column: where it begins in that line, in bytes from 0.
        before: its text as it is, spaces normalised.
        after: its text on a rank.
        why: the reason, one sentence.
    """

    function: str
    where: str
    column: int
    before: str
    after: str
    why: str = ""

    @property
    def chain(self) -> tuple[str, ...]:
        """The method, then the functions on the way to the call."""
        return tuple(self.function.split(" > "))

    @property
    def line(self) -> int:
        """The line of the argument, from 1."""
        return int(self.where.rpartition(":")[2])

    @property
    def converts(self) -> bool:
        """Whether it converts a value between states, rather than a size."""
        return self.after.startswith(f"{CONVERT}(")

    @property
    def share(self) -> str | None:
        """The name of the entry that a conversion shares with others, or None."""
        tree = self.expression()
        named = self.converts and isinstance(tree, ast.Call) and len(tree.args) == 3
        return ast.literal_eval(tree.args[2]) if named and isinstance(tree, ast.Call) else None

    @property
    def file(self) -> str:
        """The file's name, without folders."""
        return self.where.rpartition(":")[0]

    def expression(self) -> ast.expr:
        """Return ``after`` as a syntax tree: ``before``, or items of it, over a number; a number; -1; or a conversion.

        Raises:
            ValueError: it is anything else. A plan is data: what it makes a model run is bounded.
        """
        try:
            tree = ast.parse(self.after, mode="eval").body
        except SyntaxError as error:
            raise ValueError(f"{self.after!r} is no expression") from error
        if self.converts and _is_conversion(tree, self.before):
            return tree
        left: list[ast.AST] = [tree]
        while left:
            node = left.pop()
            if isinstance(node, ast.expr) and ast.unparse(node) in (self.before, INFERRED):
                continue
            number = isinstance(node, ast.Constant) and type(node.value) is int
            if not number and not isinstance(node, _ALLOWED):
                raise ValueError(f"{self.after!r} is more than a share of {self.before!r}")
            left += ast.iter_child_nodes(node)
        return tree

    def __str__(self) -> str:
        return f"{self.where} {self.before} -> {self.after}"


def _is_conversion(tree: ast.expr, before: str) -> bool:
    """Whether it is ``convert(text, before)`` or ``convert(text, before, text)``."""
    if not isinstance(tree, ast.Call) or tree.keywords or len(tree.args) not in (2, 3):
        return False
    kind, value, *share = tree.args
    texts = all(isinstance(one, ast.Constant) and isinstance(one.value, str) for one in (kind, *share))
    return texts and isinstance(tree.func, ast.Name) and ast.unparse(value) == before


def call_rewrite(data: Mapping[str, Any]) -> CallRewrite:
    """Read one from plain data.

    Raises:
        ValueError: ``where`` is no ``file:line``, or ``after`` is more than a share of ``before``.
    """
    made = CallRewrite(**data)
    if not made.where.rpartition(":")[2].isdigit():
        raise ValueError(f"where={made.where!r} is no file:line")
    made.expression()
    return made
