"""Paths into arguments and answers: change one tensor inside tuples, lists, dicts and other objects.

A path is written ``"logits"``, ``"0"``, ``"states.2.key"``; ``""`` is the value itself. Containers are never
written to: the caller may hold them, so each one on the way is copied, and only if the tensor did change.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from autoshard.errors import PlanMismatch, near

Change = Callable[[Tensor], Tensor]


def split(path: str) -> tuple[str, ...]:
    """Return the steps of ``path``."""
    return tuple(path.split(".")) if path else ()


def update(value: Any, steps: tuple[str, ...], change: Change, at: str) -> Any:
    """Return ``value`` with ``change`` applied to the tensor at ``steps``, or ``value`` itself.

    What is None, absent from a mapping or past the end of a sequence was not given and is left alone.

    Raises:
        PlanMismatch: there is something else than a tensor, or than the container that the path was written for.
    """
    if value is None:
        return None
    if not steps:
        if not isinstance(value, Tensor):
            raise _mismatch(value, "a tensor", at)
        return change(value)
    if isinstance(value, Mapping):
        return _in_mapping(value, steps, change, at)
    if isinstance(value, (tuple, list)):
        return _in_sequence(value, steps, change, at)
    if isinstance(value, Tensor) or not hasattr(value, steps[0]):
        raise _mismatch(value, f"something that has {steps[0]!r}", at)
    return _in_object(value, steps, change, at)


def _in_mapping(value: Mapping[Any, Any], steps: tuple[str, ...], change: Change, at: str) -> Any:
    key = next((key for key in value if str(key) == steps[0]), None)
    if key is None:
        return value
    new = update(value[key], steps[1:], change, at)
    if new is value[key]:
        return value
    changed: Any = copy.copy(value)
    changed[key] = new
    return changed


def _in_sequence(value: Any, steps: tuple[str, ...], change: Change, at: str) -> Any:
    fields = getattr(value, "_fields", ())
    if steps[0] in fields:
        index = fields.index(steps[0])
    elif steps[0].isdigit():
        index = int(steps[0])
    else:
        raise _mismatch(value, f"something that has {steps[0]!r}", at)
    if index >= len(value):
        return value
    new = update(value[index], steps[1:], change, at)
    if new is value[index]:
        return value
    items = [*value[:index], new, *value[index + 1 :]]
    return type(value)(*items) if fields else type(value)(items)


def _in_object(value: Any, steps: tuple[str, ...], change: Change, at: str) -> Any:
    old = getattr(value, steps[0])
    new = update(old, steps[1:], change, at)
    if new is old:
        return value
    changed = copy.copy(value)
    # a frozen dataclass refuses setattr on its copy too, though nobody has seen it yet
    object.__setattr__(changed, steps[0], new)
    return changed


def _mismatch(value: Any, wanted: str, at: str) -> PlanMismatch:
    return PlanMismatch(
        f"the plan expects {wanted} at {at}",
        got=type(value).__name__,
        help="call the model with the arguments and flags that it was planned with",
    )


class Argument:
    """One argument of a module's forward, found however the call passes it.

    Args:
        module: the module; its forward's signature is read once.
        path: ``"name"``, ``"name.0"``; ``"args.0"`` for the first of ``*args``.
        fqn: the module's name, for messages.

    Raises:
        PlanMismatch: the forward has no such argument.
    """

    def __init__(self, module: Any, path: str, fqn: str) -> None:
        parameters = list(inspect.signature(module.forward).parameters.values())
        kinds = {p.kind: p.name for p in parameters}
        self.at = f"{fqn or 'the model'}, argument {path}"
        self.name, *rest = split(path)
        self.position: int | None = None
        self.positional = sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)
        self.keywords = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
        if self.name == kinds.get(inspect.Parameter.VAR_POSITIONAL):
            self.position = self.positional + int(rest.pop(0))
        elif self.name == kinds.get(inspect.Parameter.VAR_KEYWORD):
            self.name = rest.pop(0)
        elif self.name in (names := [p.name for p in parameters]):
            index = names.index(self.name)
            self.position = index if index < self.positional else None
        elif inspect.Parameter.VAR_KEYWORD not in kinds:
            raise PlanMismatch(
                f"the forward of {fqn or 'the model'} has no argument {self.name!r}", help=near(self.name, names)
            )
        self.steps = tuple(rest)

    def update(self, args: tuple[Any, ...], kwargs: dict[str, Any], change: Change) -> tuple[Any, dict[str, Any]]:
        """Return the call's arguments with ``change`` applied to this one; it may be absent or None.

        Raises:
            PlanMismatch: see ``update``; or the call passes it in a way that the signature cannot tell.
        """
        if self.position is not None and self.position < len(args):
            new = update(args[self.position], self.steps, change, self.at)
            return (*args[: self.position], new, *args[self.position + 1 :]), kwargs
        if self.name in kwargs:
            return args, {**kwargs, self.name: update(kwargs[self.name], self.steps, change, self.at)}
        self._refuse_hidden(args, kwargs)
        return args, kwargs

    def _refuse_hidden(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise where the argument may hide among the values that the signature has no names for."""
        hidden_in_args = self.position is None and len(args) > self.positional
        past_the_named = self.position is not None and self.position >= self.positional
        hidden_in_kwargs = past_the_named and kwargs.keys() - self.keywords
        if self.name not in self.keywords and (hidden_in_args or hidden_in_kwargs):
            raise PlanMismatch(
                f"cannot tell which value is {self.at}",
                got=f"{len(args)} positional arguments and {sorted(kwargs)}",
                help="pass it as it was passed when the model was planned",
            )
