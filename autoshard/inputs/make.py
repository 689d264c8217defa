"""From guesses to the arguments of a call."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from autoshard._torch import FakeMode
from autoshard.inputs.guess import Facts, Guess


def make_tensor(guess: Guess, device: torch.device, mode: FakeMode, generator: torch.Generator) -> Any:
    """Make what ``guess`` describes: a fake tensor under ``mode``, else one drawn from ``generator``.

    Masks are all ones. Ids keep away from both ends of their range, where models keep ids with a special meaning.
    """
    if guess.kind == "value":
        return guess.value
    if mode is not None:
        with mode:
            return torch.empty(guess.shape, dtype=guess.dtype, device=device)
    if device.type == "meta":
        return torch.empty(guess.shape, dtype=guess.dtype, device=device)
    if isinstance(guess.value, Tensor) and tuple(guess.value.shape) == guess.shape:
        return guess.value.to(device)
    return real_tensor(guess.shape, guess.dtype, guess.bound if guess.kind == "ids" else None, generator).to(device)


def real_tensor(shape: tuple[int, ...], dtype: torch.dtype, bound: int | None, generator: torch.Generator) -> Tensor:
    """Draw a CPU tensor: normal floats, integers below ``bound``, or ones where an integer has none."""
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    if bound is None:
        return torch.ones(shape, dtype=dtype)
    low, high = bound // 8, bound - bound // 8
    return torch.randint(low, max(high, low + 1), shape, generator=generator).to(dtype)


def arrange(values: Mapping[str, Any], facts: Facts) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the call's ``(args, kwargs)``: what must be given goes by position, the rest by name.

    A value at ``a.x`` is in the dict ``a``, one at ``a.0`` in the tuple ``a``.
    """
    roots: dict[str, Any] = {}
    for path, value in values.items():
        root, _, key = path.partition(".")
        if key:
            roots.setdefault(root, {})[key] = value
        else:
            roots[root] = value
    for root, value in roots.items():
        if isinstance(value, dict) and all(key.isdigit() for key in value):
            roots[root] = tuple(value.values())
    positional = _positional(list(roots), facts)
    return tuple(roots.pop(name) for name in positional), roots


def path_of(path: str, names: list[str], facts: Facts) -> str:
    """Return the path in ``(args, kwargs)`` of an argument: its position, or its keyword.

    Args:
        path: the argument's name, and a key inside it.
        names: every argument that is given.
        facts: the forward's signature.
    """
    root, dot, key = path.partition(".")
    positional = _positional(list(dict.fromkeys(name.split(".")[0] for name in names)), facts)
    return (str(positional.index(root)) if root in positional else root) + dot + key


def _positional(given: list[str], facts: Facts) -> list[str]:
    found = []
    for parameter in facts.parameters:
        required = parameter.default is inspect.Parameter.empty and parameter.kind is not parameter.KEYWORD_ONLY
        if parameter.name not in given or not (required or parameter.kind is parameter.POSITIONAL_ONLY):
            break
        found.append(parameter.name)
    return found
