"""What a user may do to a sharded model that would otherwise be lost without a word.

Looked at when a forward starts, since parameters can be given hooks and unfrozen at any time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from autoshard._torch import num_tensor_hooks
from autoshard.errors import InvalidArgument
from autoshard.executor.match import join, parameter_plans
from autoshard.plans import Plan
from autoshard.words import counted


@dataclass(frozen=True)
class Watched:
    """One parameter to look at.

    Attributes:
        name: its full name.
        module: its module.
        attribute: its name there.
        in_fsdp: whether FSDP computes its gradient, behind autograd's back.
        planned_frozen: whether tensor parallelism was planned without its gradient.
    """

    name: str
    module: nn.Module
    attribute: str
    in_fsdp: bool
    planned_frozen: bool

    def check(self) -> None:
        """Refuse a hook that would never run, and a gradient that would be wrong.

        Raises:
            InvalidArgument: with what to do instead.
        """
        parameter = self.module._parameters.get(self.attribute)
        # while FSDP has it gathered it is another object, without the user's hooks
        if not isinstance(parameter, DTensor):
            return
        hooks = num_tensor_hooks(parameter) if self.in_fsdp else 0
        if hooks:
            raise InvalidArgument(
                f"{counted(hooks, 'gradient hook')} would never run: FSDP sets this gradient itself",
                at=self.name,
                help="use parameter.register_post_accumulate_grad_hook: it runs on the reduced gradient",
            )
        if self.planned_frozen and parameter.requires_grad:
            raise InvalidArgument(
                "a parameter takes a gradient that was frozen when it was planned: over tp its gradient would be wrong",
                at=self.name,
                help="plan with it trainable, parallelize, then freeze it until it is needed",
            )


def watch(model: nn.Module, plan: Plan) -> None:
    """Refuse at each forward what would be lost or wrong, and copies of FSDP modules when they are made.

    Args:
        model: the sharded model.
        plan: the plan it was sharded by.
    """
    sharded = isinstance(model, FSDPModule)
    modules = dict(model.named_modules())
    watched = [
        Watched(
            join(fqn, name),
            modules[fqn],
            name,
            in_fsdp=sharded and bool(tensor.shape),
            planned_frozen=plan.mesh.tp > 1 and not tensor.trainable,
        )
        for fqn, tensors in parameter_plans(model, plan).items()
        for name, tensor in tensors.items()
    ]
    needed = tuple(one for one in watched if one.in_fsdp or one.planned_frozen)
    if needed:
        model.register_forward_pre_hook(Watch(needed), prepend=True)
    for module in modules.values():
        if isinstance(module, FSDPModule):
            module.__dict__["__deepcopy__"] = refuse_copy


@dataclass(frozen=True)
class Watch:
    """A forward pre-hook of the model that checks every watched parameter."""

    watched: tuple[Watched, ...]

    def __call__(self, module: nn.Module, args: Any) -> None:
        """Check them."""
        for one in self.watched:
            one.check()


def refuse_copy(memo: dict[int, Any]) -> NoReturn:
    """Stand in for ``__deepcopy__`` of a module that FSDP holds.

    Raises:
        InvalidArgument: always.
    """
    raise InvalidArgument(
        "a model that FSDP holds cannot be deep-copied",
        help="copy it before it is parallelized, and parallelize the copy with the same plan: an average of weights "
        "is then torch.optim.swa_utils.AveragedModel(model) first, parallelize(averaged.module, plan) after",
    )
