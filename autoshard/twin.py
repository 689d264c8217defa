"""A twin of a model that costs nothing: the same modules and code, its tensors fake.

The user's model is never moved, cast, allocated or hooked; everything that needs to run its forward runs the twin.
Where torch's own code cannot run on a rank's share, the twin has the code that will (``replace``).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor

from autoshard import replace
from autoshard.errors import AlreadyParallelized, TraceError


@dataclass(frozen=True)
class Twin:
    """A copy of a model whose parameters and buffers are fake CPU tensors of ``mode``."""

    model: nn.Module
    mode: FakeTensorMode


def make_twin(
    model: nn.Module,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    lengths: Mapping[str, int] | None = None,
) -> Twin:
    """Copy the modules of ``model`` around fake tensors; ties and shared modules stay tied and shared.

    Args:
        model: on any device, meta included; left as it is.
        shapes: shape (elements) by parameter or buffer name, for those that differ from the model's: a rank's share.
        lengths: how many children to keep, by name of a list of blocks; all where left out.

    Raises:
        AlreadyParallelized: a parameter is a DTensor.
        TraceError: the model cannot be copied.
    """
    shapes = shapes or {}
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    memo: dict[int, object] = {}
    dropped = [child for name, n in (lengths or {}).items() for child in list(model.get_submodule(name).children())[n:]]
    for child in dropped:
        memo[id(child)] = None
    kept = _kept(model, {id(child) for child in dropped}) if dropped else None
    with mode:
        for fqn, parameter in model.named_parameters(remove_duplicate=True):
            if isinstance(parameter, DTensor):
                raise AlreadyParallelized(
                    "this model is already parallelized",
                    at=fqn,
                    got=f"a DTensor on the mesh {parameter.device_mesh}",
                    help="plan the model before it is sharded",
                )
            memo[id(parameter)] = None
            if kept is None or id(parameter) in kept:
                fake = _fake(parameter, shapes.get(fqn))
                memo[id(parameter)] = nn.Parameter(fake, requires_grad=parameter.requires_grad)
        for fqn, buffer in model.named_buffers(remove_duplicate=True):
            memo[id(buffer)] = _fake(buffer, shapes.get(fqn)) if kept is None or id(buffer) in kept else None
    try:
        twin = copy.deepcopy(model, memo)
    except (RuntimeError, TypeError, AttributeError, ValueError) as error:
        raise TraceError(
            "the model cannot be copied for tracing",
            got=f"{type(error).__name__}: {error}",
            help="hold what cannot be copied (locks, handles, non-leaf tensors) outside the module",
        ) from error
    for name, length in (lengths or {}).items():
        modules = twin.get_submodule(name)._modules
        for key in list(modules)[length:]:
            del modules[key]
    replace.apply(twin, replace.find(twin))
    return Twin(twin, mode)


def _kept(model: nn.Module, dropped: set[int]) -> set[int]:
    """Return the identities of the tensors that modules hold which are left when some are dropped."""
    found: set[int] = set()
    pending, seen = [model], set(dropped)
    while pending:
        module = pending.pop()
        if id(module) not in seen:
            seen.add(id(module))
            found.update(id(t) for t in (*module._parameters.values(), *module._buffers.values()))
            pending += module.children()
    return found


def _fake(tensor: Tensor, shape: tuple[int, ...] | None) -> Tensor:
    size = tuple(tensor.shape) if shape is None else shape
    return torch.empty(size, dtype=tensor.dtype, device="cpu")
