"""Everything that can be refused before a plan changes a model."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from autoshard.errors import AlreadyParallelized, InvalidArgument, MeshMismatch, NotDistributed, PlanMismatch, near
from autoshard.executor.aliases import check_aliases
from autoshard.executor.check_tensors import check_tensor
from autoshard.executor.collectives import Conversion
from autoshard.executor.drawing import KINDS
from autoshard.executor.lookup import refuse_unsupported
from autoshard.executor.match import boundaries_of, parameter_plans
from autoshard.executor.returned import REFUSED
from autoshard.executor.share import has_forward
from autoshard.executor.units import Units
from autoshard.paths import Argument
from autoshard.plans import AXES, ModulePlan, Plan, TensorPlan

MARK = "_autoshard"
#: What a module's plan for a cut sequence speaks of.
SIDES = ("inputs", "outputs", "returns", "takes")


def check(model: nn.Module, plan: Plan, mesh: DeviceMesh) -> None:
    """Refuse what cannot be applied; change nothing.

    Raises:
        AlreadyParallelized: the model is sharded.
        NotDistributed: there is no process group.
        MeshMismatch: the mesh or the world is not the plan's.
        PlanMismatch: the plan was made for another model.
        InvalidArgument: the plan contradicts itself, or asks for what the executor does not do yet.
    """
    check_fresh(model)
    check_mesh(plan, mesh)
    check_parameters(model, plan)
    check_buffers(model, plan)
    check_units(model, plan)
    check_aliases(model, reads_local=plan.mesh.tp > 1)
    if plan.mesh.tp > 1:
        check_modules(model, plan)


def check_fresh(model: nn.Module) -> None:
    """Refuse a model that is sharded already."""
    for fqn, module in model.named_modules():
        sharded = any(isinstance(p, DTensor) for p in module._parameters.values())
        if MARK in module.__dict__ or isinstance(module, FSDPModule) or sharded:
            raise AlreadyParallelized(
                "the model is parallelized already", at=fqn or "the model", help="build it again, then apply the plan"
            )


def check_mesh(plan: Plan, mesh: DeviceMesh) -> None:
    """Refuse a mesh or a world of another shape than the plan's."""
    if not dist.is_initialized():
        raise NotDistributed("there is no process group", help="call torch.distributed.init_process_group first")
    wanted = (plan.mesh.dp_replicate, plan.mesh.dp_shard, plan.mesh.tp)
    if dist.get_world_size() != plan.mesh.world:
        raise MeshMismatch(
            f"the plan is for {plan.mesh.world} ranks",
            got=f"{dist.get_world_size()} ranks; allowed: {plan.mesh}",
            help="plan again with this world, or start as many processes as the plan has ranks",
        )
    if tuple(mesh.shape) != wanted or mesh.mesh_dim_names != AXES:
        raise MeshMismatch(
            "the mesh is not the plan's", got=f"{mesh.mesh_dim_names} {tuple(mesh.shape)}; allowed: {AXES} {wanted}"
        )


def check_parameters(model: nn.Module, plan: Plan) -> None:
    """Refuse a model whose parameters are not the plan's, naming the first that differs."""
    named = dict(model.named_parameters(remove_duplicate=False))
    for name, tensor_plan in plan.parameters.items():
        if name not in named:
            raise PlanMismatch(f"the model has no parameter {name}", help=near(name, named))
        check_tensor(name, named[name], tensor_plan, plan)
        if tensor_plan.tied_to is not None and named.get(tensor_plan.tied_to) is not named[name]:
            raise PlanMismatch(f"the plan ties {name} to {tensor_plan.tied_to}, the model does not", at=name)
    for names in _names_by_identity(named):
        plans = [plan.parameters[name] for name in names if name in plan.parameters]
        if not plans:
            raise PlanMismatch(f"the plan does not know the parameter {names[0]}", help=near(names[0], plan.parameters))
        if len({(p.tp_dim, p.tp_parts, p.fsdp_dim, p.slices, p.slice_dim) for p in plans}) > 1:
            raise PlanMismatch(f"the plan cuts one parameter in two ways: {', '.join(names)}", at=names[0])


def _names_by_identity(named: dict[str, nn.Parameter]) -> Iterator[list[str]]:
    groups: dict[int, list[str]] = {}
    for name, parameter in named.items():
        groups.setdefault(id(parameter), []).append(name)
    yield from groups.values()


def check_buffers(model: nn.Module, plan: Plan) -> None:
    """Refuse a model whose buffers are not the plan's."""
    named = dict(model.named_buffers(remove_duplicate=False))
    for name, tensor_plan in plan.buffers.items():
        if name not in named:
            raise PlanMismatch(f"the model has no buffer {name}", help=near(name, named))
        check_tensor(name, named[name], tensor_plan, plan)
        if tensor_plan.read != "local":
            raise InvalidArgument(
                "a buffer is read as it is held", at=name, got=f"read={tensor_plan.read!r}", help="cut it with tp_dim"
            )


def check_units(model: nn.Module, plan: Plan) -> None:
    """Refuse FSDP units that the model does not have, or that FSDP would refuse later and less clearly."""
    modules = dict(model.named_modules(remove_duplicate=False))
    for name in plan.unit_modules():
        if name not in modules:
            raise PlanMismatch(f"the model has no module {name}", help=near(name, modules))
        if not has_forward(modules[name]):
            raise InvalidArgument(f"{name} has no forward of its own: it cannot be an fsdp unit", at=name)
    if plan.mesh.data > 1:
        check_fsdp(model, plan)


def check_fsdp(model: nn.Module, plan: Plan) -> None:
    """Refuse units whose parameters FSDP cannot hold together."""
    units = Units(model, plan)
    units.check()
    _check_unit_dtypes(model, units)


def _check_unit_dtypes(model: nn.Module, units: Units) -> None:
    dtypes: dict[str, dict[torch.dtype, str]] = {}
    named = dict(model.named_parameters())
    for name, parameter in named.items():
        if parameter.requires_grad and parameter.dim():
            unit = units.home(units.paths[id(parameter)])
            dtypes.setdefault(unit, {}).setdefault(parameter.dtype, name)
    for unit, found in dtypes.items():
        if len(found) > 1:
            raise InvalidArgument(
                f"an fsdp unit mixes {len(found)} dtypes of trainable parameters",
                at=unit or "the model",
                got=", ".join(f"{dtype} ({name})" for dtype, name in found.items()),
                help="cast the model to one dtype, or give the odd ones a unit of their own",
            )


def check_modules(model: nn.Module, plan: Plan) -> None:
    """Refuse a module, an argument or a conversion that does not exist."""
    modules = dict(model.named_modules(remove_duplicate=False))
    tensors = parameter_plans(model, plan)
    first_names = {id(module): name for name, module in model.named_modules()}
    for path in plan.sequence:
        Argument(model, path, "")
    for fqn, module_plan in plan.module_plans():
        if fqn not in modules:
            raise PlanMismatch(f"the model has no module {fqn}", help=near(fqn, modules))
        _check_boundary(modules[fqn], module_plan, fqn)
        if module_plan.lookup is not None:
            _check_table(modules[fqn], module_plan.lookup, tensors[first_names[id(modules[fqn])]], fqn)
    boundaries_of(model, plan)


def _check_boundary(module: nn.Module, module_plan: ModulePlan, fqn: str) -> None:
    for path, text in module_plan.inputs.items():
        Argument(module, path, fqn)
        Conversion.parse(text)
    for text in module_plan.outputs.values():
        Conversion.parse(text)
    for text in module_plan.returns.values():
        if text != REFUSED:
            Conversion.parse(text)
    for key, text in module_plan.sequence.items():
        side, _, path = key.partition(":")
        if side not in SIDES or (side in ("inputs", "takes") and not path):
            allowed = ", ".join(f"{one}:" for one in SIDES)
            raise InvalidArgument(
                f"nothing is converted at {key!r}", at=fqn, got=f"{key!r}; allowed: {allowed} and a path"
            )
        if side in ("inputs", "takes"):
            Argument(module, path, fqn)
        if text:
            Conversion.parse(text)
    if module_plan.draws not in (None, *KINDS):
        raise InvalidArgument(
            f"no way to draw random numbers is called {module_plan.draws!r}",
            at=fqn,
            got=f"{module_plan.draws!r}; allowed: None, {', '.join(map(repr, KINDS))}",
        )
    converted = {*module_plan.inputs, *(k.removeprefix("inputs:") for k in module_plan.sequence)}
    unknown = sorted(module_plan.share.keys() - converted)
    if unknown:
        raise InvalidArgument(f"{fqn} shares an argument that it does not convert: {unknown[0]}", at=fqn)


def _check_table(module: nn.Module, lookup: str, tensors: dict[str, TensorPlan], fqn: str) -> None:
    Argument(module, lookup, fqn)
    cut = [name for name, tensor_plan in tensors.items() if tensor_plan.tp_dim == 0]
    if len(cut) != 1:
        raise InvalidArgument(
            f"a row-cut table needs one parameter cut on dim 0, {fqn} has {len(cut)}", at=fqn, got=", ".join(cut)
        )
    refuse_unsupported(module, fqn)
