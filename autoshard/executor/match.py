"""Which entry of a plan belongs to which tensor of a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from autoshard.errors import InvalidArgument
from autoshard.plans import ModulePlan, Plan, TensorPlan


def parameter_plans(model: nn.Module, plan: Plan) -> dict[str, dict[str, TensorPlan]]:
    """Return the plans of each module's own parameters, by the module's first name and the attribute.

    A tied parameter that the plan lists under another of its names follows that entry.
    """
    by_tensor = _by_tensor(dict(model.named_parameters(remove_duplicate=False)), plan.parameters)
    return {f: _match(f, m._parameters, plan.parameters, by_tensor) for f, m in model.named_modules()}


def buffer_plans(model: nn.Module, plan: Plan) -> dict[str, dict[str, TensorPlan]]:
    """Return the plans of each module's own buffers, as ``parameter_plans`` does; a buffer may have none."""
    by_tensor = _by_tensor(dict(model.named_buffers(remove_duplicate=False)), plan.buffers)
    return {f: _match(f, m._buffers, plan.buffers, by_tensor) for f, m in model.named_modules()}


def boundaries_of(model: nn.Module, plan: Plan) -> dict[str, ModulePlan]:
    """Return what happens at each module, by its first name.

    A module that is registered twice has an entry for each of its names, as its parameters have; only the one for the
    name under which it was traced says more than how these are cut.

    Raises:
        InvalidArgument: two names of one module have entries that say more, and not the same.
    """
    first_names = {id(module): name for name, module in model.named_modules()}
    modules = dict(model.named_modules(remove_duplicate=False))
    found: dict[str, ModulePlan] = {}
    for fqn, entry in plan.module_plans():
        first = first_names[id(modules[fqn])]
        other = found.setdefault(first, entry)
        if _says(entry) and _says(other) and _says(entry) != _says(other):
            raise InvalidArgument(
                f"{fqn} is another name of {first}, and the plan says something else of it",
                at=fqn,
                help="give the two names the same entry, or leave one out",
            )
        if not _says(other):
            found[first] = entry
    return found


def _says(entry: ModulePlan) -> dict[str, Any]:
    """Return what an entry says beyond how parameters are cut."""
    return {name: value for name, value in vars(entry).items() if name not in ("style", "why") and value}


def _by_tensor(named: Mapping[str, Tensor], plans: Mapping[str, TensorPlan]) -> dict[int, TensorPlan]:
    found: dict[int, TensorPlan] = {}
    for name, plan in plans.items():
        if name in named:
            found.setdefault(id(named[name]), plan)
    return found


def _match(
    fqn: str, own: Mapping[str, Tensor | None], plans: Mapping[str, TensorPlan], by_tensor: Mapping[int, TensorPlan]
) -> dict[str, TensorPlan]:
    found: dict[str, TensorPlan] = {}
    for name, tensor in own.items():
        plan = plans.get(join(fqn, name)) or by_tensor.get(id(tensor))
        if tensor is not None and plan is not None:
            found[name] = plan
    return found


def join(fqn: str, name: str) -> str:
    """Return the full name of a module's attribute."""
    return f"{fqn}.{name}" if fqn else name
