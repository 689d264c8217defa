"""Tensors inside the containers that forwards take and return."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor


def tensors(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield ``(path, tensor)`` for each tensor in nested tuples, lists, mappings and dataclasses.

    A path joins indices and keys with dots; the tensor itself has the path ``""``.
    """
    for child_path, child in _walk(value, path):
        if isinstance(child, Tensor):
            yield child_path, child


def states(value: Any, path: str = "", depth: int = 4) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that sit in objects which are no containers, such as caches: what a model gets back later."""
    for child_path, child in _walk(value, path):
        if not isinstance(child, Tensor) and hasattr(child, "__dict__") and depth:
            for name, attribute in vars(child).items():
                at = f"{child_path}.{name}" if child_path else name
                yield from tensors(attribute, at)
                yield from states(attribute, at, depth - 1)


def answer(result: Any) -> Any:
    """Return what a model answered as a container: an object by its attributes, a generator by what it yields."""
    if isinstance(result, Iterator):
        return list(result)
    known = isinstance(result, (Tensor, Mapping, list, tuple)) or dataclasses.is_dataclass(result)
    return vars(result) if not known and hasattr(result, "__dict__") else result


def _walk(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        items: list[tuple[Any, Any]] = list(value.items())
    elif isinstance(value, (list, tuple)):
        items = list(enumerate(value))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        items = [(field.name, getattr(value, field.name, None)) for field in dataclasses.fields(value)]
    else:
        yield path, value
        return
    for key, item in items:
        yield from _walk(item, f"{path}.{key}" if path else str(key))
