"""Whole tensors of a sharded model, under the names and in the layout of the model as it was built."""

from __future__ import annotations

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autoshard.executor.units import reshard


def full_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Return every parameter whole, on every rank; every rank calls this.

    Tied names are all listed, with one tensor. A model that is not sharded gives its own tensors, detached.
    """
    wholes = {key: _whole(parameter.detach()) for key, parameter in _by_identity(model).items()}
    return {name: wholes[id(parameter)] for name, parameter in model.named_parameters(remove_duplicate=False)}


def full_gradients(model: nn.Module) -> dict[str, Tensor | None]:
    """Return every gradient whole, as ``full_parameters`` does; None where there is none.

    They are those of the last backward that was synchronised.
    """
    gradients = {key: parameter.grad for key, parameter in _by_identity(model).items()}
    wholes = {key: None if gradient is None else _whole(gradient) for key, gradient in gradients.items()}
    return {name: wholes[id(parameter)] for name, parameter in model.named_parameters(remove_duplicate=False)}


def _by_identity(model: nn.Module) -> dict[int, nn.Parameter]:
    """Return the sharded parameters, each once."""
    reshard(model)
    return {id(parameter): parameter for parameter in model.parameters()}


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
