"""Parameters without a dim, which FSDP refuses: held whole everywhere, gradients averaged over the data axes."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from autoshard._torch import local_part, reduces_gradients, register_first
from autoshard.executor.held import HELD, Held, hold
from autoshard.executor.styles import like
from autoshard.plans import AXES

HOOKED = "_autoshard_data_mean"


def replicate_scalars(model: nn.Module, mesh: DeviceMesh) -> set[nn.Parameter]:
    """Hold every scalar whole on the mesh that FSDP puts all the other parameters on, and return them.

    Args:
        model: with or without tensor parallelism, before FSDP.
        mesh: the whole mesh.
    """
    whole = mesh if mesh[AXES[2]].size() > 1 else mesh[AXES[0], AXES[1]]
    owners: list[tuple[nn.Module, str]] = []
    placed: dict[int, nn.Parameter] = {}
    for module in list(model.modules()):
        names = [name for name, p in module._parameters.items() if p is not None and p.dim() == 0]
        for name in names:
            old = module._parameters[name]
            assert old is not None
            module._parameters[name] = placed.setdefault(id(old), _on_mesh(old, whole))
            owners.append((module, name))
        _read_on(module, names, whole)
    if placed:
        model.register_forward_pre_hook(_Install(owners, DataMean(weakref.ref(model), mesh)))
    return set(placed.values())


def _read_on(module: nn.Module, names: list[str], mesh: DeviceMesh) -> None:
    helds: dict[str, Held] | None = module.__dict__.get(HELD)
    if helds is not None:
        for name in names:
            helds[name].mesh = mesh
    elif names:
        hold(module, {name: Held(None, mesh) for name in names}, {})


def _on_mesh(parameter: nn.Parameter, mesh: DeviceMesh) -> nn.Parameter:
    local = local_part(parameter) if isinstance(parameter, DTensor) else parameter.detach()
    held = DTensor.from_local(local, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return like(held, parameter)


@dataclass(eq=False)
class DataMean:
    """A post-accumulate hook: average a scalar's gradient over the data axes, unless gradients are not in sync.

    Averaging what is equal on all ranks changes nothing, so the share of earlier backwards stays right.

    Attributes:
        model: the root module, weakly: the collector does not see what hooks of tensors hold, and would never free it.
        mesh: the whole mesh.
    """

    model: weakref.ref[nn.Module]
    mesh: DeviceMesh

    def __call__(self, parameter: Tensor) -> None:
        """Average ``parameter.grad`` in place."""
        model = self.model()
        if parameter.grad is None or model is None or reduces_gradients(model) is False:
            return
        assert isinstance(parameter.grad, DTensor)
        gradient = local_part(parameter.grad)
        for axis in AXES[:2]:
            size = self.mesh[axis].size()
            if size > 1:
                dist.all_reduce(gradient, group=self.mesh.get_group(axis))
                gradient /= size


@dataclass(eq=False)
class _Install:
    """Register the hook where it is not; a forward pre-hook, since ``to_empty`` drops hooks of parameters.

    Attributes:
        owners: the module and name of each scalar.
        mean: the hook.
    """

    owners: list[tuple[nn.Module, str]]
    mean: DataMean

    def __call__(self, module: nn.Module, args: Any) -> None:
        """Go through the scalars."""
        for owner, name in self.owners:
            parameter = owner._parameters[name]
            if parameter is not None and parameter.requires_grad and HOOKED not in parameter.__dict__:
                # a user's hook may take the optimizer's step at once
                register_first(parameter, self.mean)
                parameter.__dict__[HOOKED] = True
