"""Where the search starts: the model's own dummy inputs, then what its forward's signature asks for."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from autoshard.inputs.guess import Dim, Facts, Guess
from autoshard.inputs.refine import Candidate
from autoshard.user_code import ERRORS


def seeds(model: nn.Module, facts: Facts) -> Iterator[Candidate]:
    """Yield the first candidates, the likeliest first."""
    yield from _dummies(model, facts)
    required = [p for p in facts.parameters if p.default is inspect.Parameter.empty]
    if required:
        yield _from(required, facts, 0)
        return
    main = getattr(model, "main_input_name", None)
    for index, parameter in enumerate(sorted(facts.parameters, key=lambda parameter: parameter.name != main)[:3]):
        yield _from([parameter], facts, index)
    yield Candidate({}, facts.sequence, cost=1)


def _from(parameters: list[inspect.Parameter], facts: Facts, cost: int) -> Candidate:
    return Candidate({p.name: facts.first_guess(p) for p in parameters}, facts.sequence, cost=cost)


def _dummies(model: nn.Module, facts: Facts) -> Iterator[Candidate]:
    """Yield the model's dummy inputs at our sizes, then as they are."""
    try:
        dummies: Any = getattr(model, "dummy_inputs", None)
    except ERRORS:
        return
    names = {parameter.name for parameter in facts.parameters}
    usable = isinstance(dummies, Mapping) and len(dummies) > 0 and set(dummies) <= names
    if not usable or not all(isinstance(value, Tensor) for value in dummies.values()):
        return
    if all(_is_ids(value) for value in dummies.values()):
        resized = {name: _resized(name, value, facts) for name, value in dummies.items()}
        yield Candidate(resized, facts.sequence)
    yield Candidate({name: _as_is(value) for name, value in dummies.items()}, facts.sequence, cost=1)


def _is_ids(value: Tensor) -> bool:
    return value.ndim == 2 and not value.dtype.is_floating_point


def _resized(name: str, value: Tensor, facts: Facts) -> Guess:
    mask = value.dtype is torch.bool or int(value.max()) <= 1
    return facts.ones(2, value.dtype) if mask else facts.ids(2)


def _as_is(value: Tensor) -> Guess:
    dims = tuple(Dim("length", size, True) for size in value.shape)
    if value.dtype.is_floating_point:
        return Guess("float", dims, value.dtype, value=value)
    return Guess("ids", dims, value.dtype, int(value.max()) + 1, value)
