"""Integer attributes and arguments in the source that a plan sets: sizes in the user's code become a rank's share."""

from __future__ import annotations

from torch import nn

from autoshard.errors import PlanMismatch, near
from autoshard.nested import integer, integers, set_integer
from autoshard.plans import Plan
from autoshard.rewrite.functions import Convert, prepare, unchanged
from autoshard.rewrite.pickled import install
from autoshard.rewrite.source import NoSource


def check_attributes(model: nn.Module, plan: Plan) -> None:
    """Refuse a plan that sets what the model's modules do not have.

    Raises:
        PlanMismatch: an attribute is missing or no integer; or the code of a module does not read what is rewritten.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    for fqn, boundary in plan.module_plans():
        for name in boundary.attributes:
            if fqn not in modules or integer(modules[fqn], name) is None:
                known = integers(modules[fqn]) if fqn in modules else []
                raise PlanMismatch(
                    f"the plan sets {name}, which the module does not have", at=fqn, help=near(name, known)
                )
        if boundary.rewrites and fqn not in modules:
            raise PlanMismatch("the plan rewrites the code of a module that the model does not have", at=fqn)
        try:
            prepare(modules[fqn], boundary.rewrites) if boundary.rewrites else None
        except NoSource as error:
            raise PlanMismatch(
                "the plan rewrites code that the module does not have",
                at=f"{fqn} ({boundary.rewrites[0].where})",
                got=str(error),
                help="make the plan again from the source as it is now",
            ) from error


def set_attributes(model: nn.Module, plan: Plan, convert: Convert = unchanged) -> None:
    """Set the attributes and install the rewritten methods, each on its own instance.

    Args:
        model: the model.
        plan: its plan.
        convert: converts a value inside a rewritten method, by the conversion's text and a shared entry's name.
    """
    for fqn, boundary in plan.module_plans():
        module = model.get_submodule(fqn)
        for name, value in boundary.attributes.items():
            set_integer(module, name, value)
        install(module, boundary.rewrites, convert)
