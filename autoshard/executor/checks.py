"""Everything that can be refused before a plan changes a model."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from autoshard._torch import num_parameter_hooks
from autoshard.errors import AlreadyParallelized, InvalidArgument, MeshMismatch, NotDistributed, PlanMismatch, near
from autoshard.executor.aliases import check_aliases
from autoshard.executor.collectives import Conversion
from autoshard.executor.lookup import refuse_unsupported
from autoshard.executor.match import parameter_plans
from autoshard.executor.share import has_forward
from autoshard.executor.units import Units
from autoshard.paths import Argument
from autoshard.plans import AXES, ModulePlan, Plan, TensorPlan

MARK = "_autoshard"


def check(model: nn.Module, plan: Plan, mesh: DeviceMesh, simulation: bool = False) -> None:
    """Refuse what cannot be applied; change nothing. A simulation may cut in parts: it writes no checkpoints.

    Raises:
        AlreadyParallelized: the model is sharded.
        NotDistributed: there is no process group.
        MeshMismatch: the mesh or the world is not the plan's.
        PlanMismatch: the plan was made for another model.
        InvalidArgument: the plan contradicts itself, or asks for what the executor does not do yet.
    """
    check_fresh(model)
    check_mesh(plan, mesh)
    check_parameters(model, plan, simulation)
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


def check_parameters(model: nn.Module, plan: Plan, simulation: bool = False) -> None:
    """Refuse a model whose parameters are not the plan's, naming the first that differs."""
    named = dict(model.named_parameters(remove_duplicate=False))
    for name, tensor_plan in plan.parameters.items():
        if name not in named:
            raise PlanMismatch(f"the model has no parameter {name}", help=near(name, named))
        check_tensor(name, named[name], tensor_plan, plan, simulation)
        if tensor_plan.tied_to is not None and named.get(tensor_plan.tied_to) is not named[name]:
            raise PlanMismatch(f"the plan ties {name} to {tensor_plan.tied_to}, the model does not", at=name)
    for names in _names_by_identity(named):
        plans = [plan.parameters[name] for name in names if name in plan.parameters]
        if not plans:
            raise PlanMismatch(f"the plan does not know the parameter {names[0]}", help=near(names[0], plan.parameters))
        if len({(p.tp_dim, p.fsdp_dim) for p in plans}) > 1:
            raise PlanMismatch(f"the plan cuts one parameter in two ways: {', '.join(names)}", at=names[0])


def _names_by_identity(named: dict[str, nn.Parameter]) -> Iterator[list[str]]:
    groups: dict[int, list[str]] = {}
    for name, parameter in named.items():
        groups.setdefault(id(parameter), []).append(name)
    yield from groups.values()


def check_tensor(name: str, tensor: Tensor, tensor_plan: TensorPlan, plan: Plan, simulation: bool = False) -> None:
    """Refuse one tensor that is not what the plan says, or a plan for it that cannot be followed."""
    if is_lazy(tensor):
        raise PlanMismatch("a parameter has no shape yet", at=name, help="run the model once before planning")
    got = (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
    if got != (tensor_plan.shape, tensor_plan.dtype):
        raise PlanMismatch(
            f"{name} is not what the plan was made for",
            got=f"{got[0]} {got[1]}; planned: {tensor_plan.shape} {tensor_plan.dtype}",
            help="make the plan from this model",
        )
    if tensor.requires_grad and not tensor_plan.trainable:
        raise PlanMismatch(f"{name} takes a gradient and was frozen when it was planned", at=name)
    if num_parameter_hooks(tensor):
        raise InvalidArgument(
            f"{name} has {num_parameter_hooks(tensor)} gradient hooks, which would be lost",
            at=name,
            help="register them after the plan is applied",
        )
    _check_cut(name, tensor_plan, plan.mesh.tp)
    _check_parts(name, tensor_plan, plan.mesh.tp, simulation)
    _check_not_yet(name, tensor_plan, plan.mesh.tp)
    _check_fsdp_dim(name, tensor_plan, plan)


def _check_cut(name: str, tensor_plan: TensorPlan, tp: int) -> None:
    dim = tensor_plan.tp_dim
    if dim is None:
        return
    if not 0 <= dim < len(tensor_plan.shape) or tensor_plan.shape[dim] % tp:
        raise InvalidArgument(
            f"dim {dim} of {tensor_plan.shape} cannot be cut evenly over {tp} tensor-parallel ranks", at=name
        )
    if tensor_plan.grad_sum is not None or tensor_plan.read != "local":
        raise InvalidArgument("a parameter that is cut has its own gradient and value on each rank", at=name)


def _check_parts(name: str, tensor_plan: TensorPlan, tp: int, simulation: bool) -> None:
    parts, dim = tensor_plan.tp_parts, tensor_plan.tp_dim
    if parts is None:
        return
    if not simulation:
        raise InvalidArgument("cutting a parameter in parts is not supported yet: checkpoints need them too", at=name)
    ends = [0, *(offset + length for offset, length in parts)]
    whole = dim is not None and [offset for offset, _ in parts] == ends[:-1] and ends[-1] == tensor_plan.shape[dim]
    if not whole or any(length % tp for _, length in parts):
        raise InvalidArgument(
            f"the parts do not make up dim {dim} of {tensor_plan.shape} in pieces that {tp} divides",
            at=name,
            got=str(parts),
        )


def _check_not_yet(name: str, tensor_plan: TensorPlan, tp: int) -> None:
    copies = 1 if tensor_plan.tp_dim is not None else tp
    grad_sum = tensor_plan.grad_sum
    if tensor_plan.tp_copies != copies:
        raise InvalidArgument(
            f"{tensor_plan.tp_copies} copies of a piece over {tp} ranks are not supported yet",
            at=name,
            got=f"{tensor_plan.tp_copies}; allowed: {copies}",
        )
    if grad_sum is not None and (grad_sum.parts is not None or grad_sum.ranks != tp):
        raise InvalidArgument(
            "summing part of a gradient, or over part of the ranks, is not supported yet", at=name, got=str(grad_sum)
        )
    if tensor_plan.read not in ("local", "first_rank"):
        raise InvalidArgument(f"no way to read a parameter is called {tensor_plan.read!r}", at=name)
    if tensor_plan.read == "first_rank" and grad_sum is not None:
        raise InvalidArgument(
            "a parameter that is read on the first rank has its whole gradient on every rank", at=name
        )


def _check_fsdp_dim(name: str, tensor_plan: TensorPlan, plan: Plan) -> None:
    dim = tensor_plan.fsdp_dim
    if not dim:
        return
    size = tensor_plan.shape[dim] // (plan.mesh.tp if dim == tensor_plan.tp_dim else 1)
    if size % plan.mesh.dp_shard:
        raise InvalidArgument(
            f"fsdp cannot cut dim {dim} of {tensor_plan.shape} over {plan.mesh.dp_shard} ranks evenly", at=name
        )


def check_buffers(model: nn.Module, plan: Plan) -> None:
    """Refuse a model whose buffers are not the plan's."""
    named = dict(model.named_buffers(remove_duplicate=False))
    for name, tensor_plan in plan.buffers.items():
        if name not in named:
            raise PlanMismatch(f"the model has no buffer {name}", help=near(name, named))
        check_tensor(name, named[name], tensor_plan, plan)


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
    for fqn, module_plan in plan.module_plans():
        if fqn not in modules:
            raise PlanMismatch(f"the model has no module {fqn}", help=near(fqn, modules))
        _check_boundary(modules[fqn], module_plan, fqn)
        if module_plan.lookup is not None:
            _check_table(modules[fqn], module_plan.lookup, tensors[first_names[id(modules[fqn])]], fqn)


def _check_boundary(module: nn.Module, module_plan: ModulePlan, fqn: str) -> None:
    for path, text in module_plan.inputs.items():
        Argument(module, path, fqn)
        Conversion.parse(text)
    for text in module_plan.outputs.values():
        Conversion.parse(text)
    unknown = sorted(module_plan.share.keys() - module_plan.inputs.keys())
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
