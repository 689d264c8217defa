"""Example inputs that the user gave: taken as they are, only their dims are guessed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from autoshard.errors import InvalidArgument
from autoshard.outputs import tensors

Dims = tuple[str | None, ...]


def split_given(given: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return ``(args, kwargs)`` of a tuple of arguments, a dict of keywords, a pair of both, or one tensor.

    Raises:
        InvalidArgument: it is something else.
    """
    if isinstance(given, Tensor):
        return (given,), {}
    if isinstance(given, Mapping) and all(isinstance(key, str) for key in given):
        return (), dict(given)
    if isinstance(given, (tuple, list)):
        pair = len(given) == 2 and isinstance(given[0], (tuple, list)) and isinstance(given[1], Mapping)
        if pair and all(isinstance(key, str) for key in given[1]):
            return tuple(given[0]), dict(given[1])
        return tuple(given), {}
    raise InvalidArgument(
        "example_inputs are not arguments of a forward",
        got=f"{type(given).__name__}; allowed: a tuple of arguments, a dict of keyword arguments, (args, kwargs)",
        help="pass example_inputs=(x,) for model(x), or example_inputs={'x': x} for model(x=x)",
    )


def given_dims(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Dims]:
    """Guess what the dims of given tensors stand for, from the first tensor that has any.

    Its dim 0 is the batch. Dim 1 is the sequence where the tensor holds integers, or floats with three dims. In every
    other tensor the dims of the same sizes are the same, a float's last dim excepted.
    """
    found = [*tensors(args), *tensors(kwargs)]
    sized = [tensor for _, tensor in found if tensor.ndim > 0]
    if not sized:
        return {path: () for path, _ in found}
    batch = sized[0].shape[0]
    sequence = next((tensor.shape[1] for tensor in sized if _has_sequence(tensor) and tensor.shape[0] == batch), None)
    return {path: _dims(tensor, batch, sequence) for path, tensor in found}


def _has_sequence(tensor: Tensor) -> bool:
    return tensor.ndim == 3 if tensor.dtype.is_floating_point else tensor.ndim >= 2


def _dims(tensor: Tensor, batch: int, sequence: int | None) -> Dims:
    dims: list[str | None] = [None] * tensor.ndim
    if tensor.ndim and tensor.shape[0] == batch:
        dims[0] = "batch"
    last = tensor.ndim - 1 if tensor.dtype.is_floating_point and not _square(tensor) else tensor.ndim
    if sequence is not None and not (tensor.dtype.is_floating_point and tensor.ndim == 4 and not _square(tensor)):
        for index in range(tensor.ndim):
            if dims[index] is None and index < last and tensor.shape[index] == sequence:
                dims[index] = "sequence"
    return tuple(dims)


def _square(tensor: Tensor) -> bool:
    """Whether it may be a mask over pairs of positions."""
    return tensor.ndim >= 2 and tensor.shape[-1] == tensor.shape[-2]
