"""Integer attributes that a plan sets, so that sizes in the user's own code become a rank's share."""

from __future__ import annotations

from torch import nn

from autoshard.errors import PlanMismatch, near
from autoshard.plans import Plan


def check_attributes(model: nn.Module, plan: Plan) -> None:
    """Refuse a plan that sets attributes the model's modules do not have.

    Raises:
        PlanMismatch: an attribute is missing, or is no integer.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    for fqn, boundary in plan.module_plans():
        for name in boundary.attributes:
            known = {k: v for k, v in vars(modules[fqn]).items() if type(v) is int} if fqn in modules else {}
            if name not in known:
                raise PlanMismatch(
                    f"the plan sets {name}, which the module does not have", at=fqn, help=near(name, known)
                )


def set_attributes(model: nn.Module, plan: Plan) -> None:
    """Set the attributes on the modules, each on its own instance."""
    for fqn, boundary in plan.module_plans():
        for name, value in boundary.attributes.items():
            setattr(model.get_submodule(fqn), name, value)
