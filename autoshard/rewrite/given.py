"""In which order torch is given what a call or an operator is written with."""

from __future__ import annotations

import ast
import inspect
from types import FrameType, FunctionType, ModuleType
from typing import Any

import torch
from torch import nn


def is_function(node: ast.expr, frame: FrameType) -> bool:
    """Whether a call is written ``torch.view(x, ...)`` rather than ``x.view(...)``."""
    if not isinstance(node, ast.Call) or isinstance(node.func, ast.Name):
        return True
    first, _ = _chain(node.func)
    return isinstance(_variable(first, frame), (ModuleType, type))


def operands(node: ast.expr, frame: FrameType) -> tuple[ast.expr, ...]:
    """Return the operands of an operator in the order in which torch is given them, where that is clear.

    Behind a number a tensor comes first: ``2 * x`` is ``x.__rmul__(2)``. Of one tensor taken twice, ``x * x``, neither
    text is all that is taken.
    """
    if not isinstance(node, ast.BinOp):
        return ()
    left, right = _value(node.left, frame), _value(node.right, frame)
    if isinstance(left, (int, float)):
        return node.right, node.left
    return (node.left, node.right) if isinstance(left, torch.Tensor) and left is not right else ()


def parameters(node: ast.expr, frame: FrameType) -> tuple[str, ...]:
    """Return the parameters of the function of torch that a call names, if that hands itself over to modes."""
    if not isinstance(node, ast.Call):
        return ()
    first, steps = _chain(node.func)
    held = _variable(first, frame)
    for step in steps:
        held = vars(held).get(step) if isinstance(held, ModuleType) else None
    if not isinstance(held, FunctionType) or "handle_torch_function" not in held.__code__.co_names:
        return ()
    code = held.__code__
    return code.co_varnames[: code.co_argcount] if not code.co_flags & inspect.CO_VARARGS else ()


def _chain(node: ast.expr) -> tuple[ast.expr, list[str]]:
    """Return what attributes are taken of, and their names in that order: ``torch``, ``[nn, functional, linear]``."""
    steps: list[str] = []
    while isinstance(node, ast.Attribute):
        steps.insert(0, node.attr)
        node = node.value
    return node, steps


def _variable(node: ast.expr, frame: FrameType) -> Any:
    """Return what a plain name means in a frame; None for any other expression."""
    return frame.f_locals.get(node.id, frame.f_globals.get(node.id)) if isinstance(node, ast.Name) else None


def _value(node: ast.expr, frame: FrameType) -> Any:
    """Return what an operand is, if no code has to run for that; else None."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        return frame.f_locals.get(node.id)
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        held = frame.f_locals.get(node.value.id)
        if isinstance(held, nn.Module):
            return next(
                (vs[node.attr] for vs in (vars(held), held._parameters, held._buffers) if node.attr in vs), None
            )
    return None
