"""A model on its way to other processes: pickled, or rebuilt there from the target that named it."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from autoshard.errors import InvalidArgument
from autoshard.proving.replica import Shape, replicate
from autoshard.proving.smaller import Smaller

#: What pickle lets through when it meets something that it cannot name.
_UNPICKLABLE = (pickle.PicklingError, AttributeError, TypeError, RuntimeError, NotImplementedError)


@dataclass(frozen=True)
class Parcel:
    """A model as bytes, or as a target and what the model it names differs in.

    Attributes:
        pickled: the whole model, or None.
        target: what ``targets.load_model`` reads, or None.
        shapes: as in ``Smaller``; likewise ``dropped``.
        values: parameters and buffers by name.
    """

    pickled: bytes | None
    target: str | None
    shapes: Mapping[str, Shape]
    dropped: frozenset[str]
    values: Mapping[str, Tensor]


def pack(model: nn.Module, smaller: Smaller, target: str | None) -> Parcel:
    """Return ``model`` in a form that another process can open.

    Args:
        model: small and on CPU.
        smaller: in what it differs from the model that ``target`` names.
        target: the command line's target, if there is one.

    Raises:
        InvalidArgument: it cannot be pickled, and there is no target.
    """
    why = f"{type(model).__name__} is defined in __main__ without a file" if _only_here(model) else ""
    try:
        pickled = None if why else pickle.dumps(model)
    except _UNPICKLABLE as error:
        pickled, why = None, f"{type(error).__name__}: {error}"[:300]
    if pickled is None and target is None:
        raise InvalidArgument(
            "the model cannot be sent to other processes",
            got=why,
            help="define its classes in a module that can be imported, or run `autoshard verify TARGET --processes N`",
        )
    values = {} if pickled is not None else _values(model)
    return Parcel(pickled, target, smaller.shapes, smaller.dropped, values)


def unpack(parcel: Parcel) -> nn.Module:
    """Return the model of a parcel; in another process, classes of a target's file are imported first."""
    if parcel.pickled is None:
        assert parcel.target is not None
        return _rebuilt(_load(parcel.target), parcel)
    try:
        model: nn.Module = pickle.loads(parcel.pickled)
    except (ImportError, AttributeError):
        if parcel.target is None:
            raise
        _load(parcel.target)
        model = pickle.loads(parcel.pickled)
    return model


def _load(target: str) -> nn.Module:
    from autoshard.targets import load_model

    return load_model(target)


def _rebuilt(whole: nn.Module, parcel: Parcel) -> nn.Module:
    def empty(tensor: Tensor, shape: Shape) -> Tensor:
        return torch.zeros(shape, dtype=torch.float64 if tensor.dtype.is_floating_point else tensor.dtype)

    model = replicate(whole, empty, empty, parcel.shapes, parcel.dropped).eval()
    for name, tensor in _values(model).items():
        tensor.copy_(parcel.values[name])
    return model


def _values(model: nn.Module) -> dict[str, Tensor]:
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: tensor.detach() for name, tensor in named}


def _only_here(model: nn.Module) -> bool:
    """Whether a class of the model lives in a notebook or an interactive session, which no process can import."""
    here = any(type(module).__module__ == "__main__" for module in model.modules())
    return here and not hasattr(sys.modules["__main__"], "__file__")
