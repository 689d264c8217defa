"""FSDP units: which parameters are gathered together, and ``fully_shard`` bottom-up over them.

The mesh handed over is always the true pair ``(dp_replicate, dp_shard)``, so plain FSDP, HSDP and replication are
one path. A tied parameter belongs to the innermost unit that holds all its owners; scalars, which FSDP refuses,
are left to ``scalars``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import Shard

from autoshard.errors import InvalidArgument
from autoshard.plans import AXES, Plan


class Units:
    """The units of a plan in one model, innermost first; the model itself is always the last.

    A module may have several names; what is inside a unit is judged by every path that leads to it.
    """

    def __init__(self, model: nn.Module, plan: Plan) -> None:
        self.model = model
        self.modules = dict(model.named_modules(remove_duplicate=False))
        planned = sorted(plan.unit_modules(), key=lambda name: -name.count(".") - (name != ""))
        by_module = {id(self.modules[name]): name for name in [*planned, ""]}
        self.names = list(by_module.values())

    @cached_property
    def paths(self) -> dict[int, list[str]]:
        """Names of the modules that own each parameter, by the parameter's identity; ties have several."""
        found: dict[int, list[str]] = {}
        for name, module in self.modules.items():
            for parameter in module._parameters.values():
                if parameter is not None:
                    found.setdefault(id(parameter), []).append(name)
        return found

    def home(self, paths: Iterable[str]) -> str:
        """Return the innermost unit that every path passes through."""
        return next(unit for unit in self.names if all(self._passes(path, unit) for path in paths))

    def homes_of_modules(self) -> dict[int, str]:
        """Return the innermost unit that holds each module under all its names, by the module's identity."""
        names: dict[int, list[str]] = {}
        for name, module in self.modules.items():
            names.setdefault(id(module), []).append(name)
        return {key: self.home(paths) for key, paths in names.items()}

    def check(self) -> None:
        """Refuse ties that FSDP cannot follow: a unit sees a shared parameter only from a module of its own.

        Raises:
            InvalidArgument: all owners of a tied parameter are in inner units, and no two in the same.
        """
        for paths in self.paths.values():
            inner = {self.home([path]) for path in paths}
            if self.home(paths) not in inner:
                raise InvalidArgument(
                    f"a parameter is shared by {len(inner)} fsdp units and belongs to none of them",
                    at=", ".join(paths),
                    got=f"units {', '.join(sorted(inner))}",
                    help="take one of them off the plan's units",
                )

    def _passes(self, path: str, unit: str) -> bool:
        target, steps = self.modules[unit], path.split(".") if path else []
        return any(self.modules[".".join(steps[:depth])] is target for depth in range(len(steps) + 1))


def shard(
    model: nn.Module,
    plan: Plan,
    mesh: DeviceMesh,
    scalars: set[nn.Parameter],
    policies: Callable[[bool], dict[str, Any]] = lambda root: {},
) -> None:
    """Apply ``fully_shard`` to every unit, the model last.

    Args:
        model: its parameters are plain, or DTensors on the tp mesh.
        plan: for the units, and the dims that are cut.
        mesh: the whole mesh.
        scalars: parameters that FSDP must leave alone.
        policies: further arguments of ``fully_shard``, for the model (True) or a unit inside (False).
    """
    units = Units(model, plan)
    dims = _fsdp_dims(model, plan)
    outer = _of_outer_units(units)
    _make_contiguous(model)
    for unit in units.names:
        fully_shard(
            units.modules[unit],
            mesh=mesh[AXES[0], AXES[1]],
            shard_placement_fn=lambda parameter: Shard(dims.get(id(parameter), 0)),
            ignored_params=scalars | outer.pop(unit) or None,
            reshard_after_forward=None if plan.reshard else False,
            **policies(units.modules[unit] is model),
        )


def _of_outer_units(units: Units) -> dict[str, set[nn.Parameter]]:
    """Return, per unit, the parameters inside it that belong to a unit around it: they are tied to something there."""
    order = {unit: index for index, unit in enumerate(units.names)}
    homes = {key: order[units.home(paths)] for key, paths in units.paths.items()}
    return {unit: {p for p in units.modules[unit].parameters() if homes[id(p)] > order[unit]} for unit in units.names}


def _fsdp_dims(model: nn.Module, plan: Plan) -> dict[int, int]:
    """Return the dim that FSDP cuts, by identity, where it is not the first."""
    named = dict(model.named_parameters(remove_duplicate=False))
    return {id(named[name]): tensor.fsdp_dim for name, tensor in plan.parameters.items() if tensor.fsdp_dim}


def _make_contiguous(model: nn.Module) -> None:
    for parameter in model.parameters():
        if not parameter.is_contiguous():
            parameter.data = parameter.data.contiguous()


def reshard(model: nn.Module) -> None:
    """Free what FSDP has gathered, so that ``parameters()`` are the sharded ones; nothing without FSDP."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
