"""Nested values with holes where their tensors were: what a call was given or returned, kept without the tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

# what is never looked into: it holds code, not what a call works on
_OPAQUE = (nn.Module, type, FunctionType, MethodType, ModuleType, MappingProxyType, str, bytes, int, float, complex)
_DEPTH = 4


@dataclass(frozen=True)
class Hole:
    """The place of a tensor.

    Attributes:
        index: the same for two places that held one tensor.
        shape: elements.
        dtype: torch's dtype.
    """

    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Passed:
    """The place of an object that the call was given, and gave back: its number among those it was given."""

    number: int


class Snapshot:
    """Makes templates of the arguments and the answer of one call."""

    def __init__(self) -> None:
        self._kept: list[Tensor] = []
        self._indices: dict[int, int] = {}

    def of(self, value: Any, given: Any = ()) -> Any:
        """Return ``value`` with a ``Hole`` for each tensor, and ``Passed`` for each object that is in ``given``."""
        numbers = {id(one): number for number, one in enumerate(objects(given))}

        def change(leaf: Any) -> Any:
            if isinstance(leaf, Tensor):
                return self._hole(leaf)
            return Passed(numbers[id(leaf)]) if id(leaf) in numbers else leaf

        return transform(value, change)

    def _hole(self, tensor: Tensor) -> Hole:
        if id(tensor) not in self._indices:
            self._kept.append(tensor)  # so that no other tensor takes its id
            self._indices[id(tensor)] = len(self._indices)
        return Hole(self._indices[id(tensor)], tuple(int(size) for size in tensor.shape), tensor.dtype)


def fill(template: Any, tensors: Mapping[int, Tensor], given: Any = ()) -> Any:
    """Return a template's value with tensors in its holes, by index, and ``given``'s objects where they were passed."""
    passed = objects(given)

    def change(leaf: Any) -> Any:
        if isinstance(leaf, Hole):
            return tensors[leaf.index]
        if isinstance(leaf, Passed):
            return passed[leaf.number] if leaf.number < len(passed) else None
        return leaf

    return transform(template, change)


def holes(template: Any) -> list[Hole]:
    """Return the distinct holes of a template, in reading order."""
    found: dict[int, Hole] = {}

    def note(leaf: Any) -> Any:
        if isinstance(leaf, Hole):
            found.setdefault(leaf.index, leaf)
        return leaf

    transform(template, note)
    return list(found.values())


def objects(value: Any) -> list[Any]:
    """Return the objects in nested arguments that have attributes and are no containers, such as caches."""
    if isinstance(value, Mapping):
        return [one for item in value.values() for one in objects(item)]
    if isinstance(value, (list, tuple)):
        return [one for item in value for one in objects(item)]
    return [value] if _has_attributes(value) else []


def transform(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return ``value`` with ``change`` applied to its leaves; containers are copied, and objects that change."""
    return _transform(value, change, _DEPTH)


def _transform(value: Any, change: Callable[[Any], Any], depth: int) -> Any:
    if isinstance(value, (Tensor, Hole, Passed)):
        return change(value)
    if isinstance(value, Mapping) and not isinstance(value, MappingProxyType):
        return _replaced(value, {key: _transform(item, change, depth) for key, item in value.items()})
    if isinstance(value, (list, tuple)):
        items = [_transform(item, change, depth) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)) and isinstance(value, tuple):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if not _has_attributes(value):
        return value
    changed = change(value)
    if changed is not value or not depth:
        return changed
    found = {name: _transform(item, change, depth - 1) for name, item in vars(value).items()}
    if not _differ(found, vars(value)):
        return value
    other = copy.copy(value)
    vars(other).update(found)
    return other


def _differ(new: Mapping[str, Any], old: Mapping[str, Any]) -> bool:
    """Whether a leaf changed: a container that was only copied does not count."""
    return any(_changed(new[name], old[name]) for name in old)


def _changed(new: Any, old: Any) -> bool:
    if new is old:
        return False
    if isinstance(old, Mapping):
        return any(_changed(new[key], old[key]) for key in old)
    if isinstance(old, (list, tuple)) and isinstance(new, (list, tuple)):
        return any(_changed(a, b) for a, b in zip(new, old, strict=True))
    return True


def _replaced(value: Mapping[Any, Any], items: Mapping[Any, Any]) -> Any:
    if type(value) is dict or not hasattr(value, "__setitem__"):
        return dict(items)
    other: Any = copy.copy(value)
    for key, item in items.items():
        if item is not value[key]:
            other[key] = item
    return other


def _has_attributes(value: Any) -> bool:
    return hasattr(value, "__dict__") and not isinstance(value, (*_OPAQUE, Tensor, Hole, Passed, Iterator))
