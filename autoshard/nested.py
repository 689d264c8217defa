"""Integers inside what a module holds: in a list, or in a plain object such as a config, by dotted names.

An object that several modules share is never changed: the module gets its own shallow copy.
"""

from __future__ import annotations

import copy
import enum
from collections.abc import Mapping
from types import FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

_OTHER = (nn.Module, Tensor, type, ModuleType, FunctionType, MethodType, enum.Enum, int, float, str, list, tuple, dict)


def is_plain(value: Any) -> bool:
    """Whether a value is an object with attributes of its own, and no module, tensor, container or code."""
    return hasattr(value, "__dict__") and not isinstance(value, _OTHER) and not callable(value)


def with_attributes(value: Any, attributes: Mapping[str, Any]) -> Any:
    """Return a shallow copy of an object with other attributes; itself where there are none.

    They are set past ``__setattr__``: a frozen or validated dataclass does not know what a rank may have.
    """
    if not attributes:
        return value
    made = copy.copy(value)
    vars(made).update(attributes)
    return made


def integer(module: nn.Module, path: str) -> int | None:
    """Return the integer attribute with a dotted name (``heads``, ``config.heads``, ``sections.0``); None if none."""
    value: Any = module
    for step in path.split("."):
        value = _items(value).get(step)
    return value if type(value) is int else None


def integers(module: nn.Module) -> list[str]:
    """Return the dotted names of a module's integer attributes, those of the objects it holds included."""
    return [
        f"{name}.{step}" if step else name
        for name, value in vars(module).items()
        for step, item in [("", value), *_items(value).items()]
        if type(item) is int
    ]


def set_integer(module: nn.Module, path: str, number: int) -> None:
    """Set such an attribute, on copies of the objects on the way."""
    name, _, rest = path.partition(".")
    module.__dict__[name] = _with(vars(module).get(name), rest, number)


def _with(value: Any, path: str, number: int) -> Any:
    if not path:
        return number
    step, _, rest = path.partition(".")
    inner = _with(_items(value)[step], rest, number)
    if type(value) in (list, tuple):
        return type(value)(inner if str(i) == step else item for i, item in enumerate(value))
    return with_attributes(value, {step: inner})


def _items(value: Any) -> Mapping[str, Any]:
    """Return what a step of a dotted name may lead to."""
    if type(value) in (list, tuple):
        return {str(i): item for i, item in enumerate(value)}
    return vars(value) if isinstance(value, nn.Module) or is_plain(value) else {}
