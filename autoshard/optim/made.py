"""Optimizers that are made after the model was sharded: by the user's factories, on the sharded parameters.

A factory gets what ``list(model.named_parameters())`` gives once the model is sharded, and returns an optimizer; the
class itself is one (``optimizer=torch.optim.AdamW``). ``optimizers`` gives back what they made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from torch.optim import Optimizer

from autoshard.errors import OptimizerError
from autoshard.executor.inparts import InParts
from autoshard.optim.check import check_factory, check_optimizer, warn_outside

Factory = Callable[[list[tuple[str, nn.Parameter]]], Optimizer]
Wanted = Optimizer | Factory | Iterable[Optimizer | Factory] | None
"""What ``optimizer=`` takes: optimizers made before, factories, several of both, or nothing."""

_MADE = "_autoshard_optimizers"
_HELP = "pass torch.optim.Optimizer objects, or functions from named parameters to one"


def split(wanted: Wanted) -> tuple[list[Optimizer], list[Factory]]:
    """Return the optimizers that exist, and the factories, each in order.

    Raises:
        OptimizerError: something is neither, or a factory is a class that does not work on sharded parameters.
    """
    existing: list[Optimizer] = []
    factories: list[Factory] = []
    for one in _listed(wanted):
        if isinstance(one, Optimizer):
            existing.append(one)
        elif callable(one):
            check_factory(one)
            factories.append(one)
        else:
            raise OptimizerError(f"a {type(one).__name__} is not an optimizer, nor does it make one", help=_HELP)
    return existing, factories


def _listed(wanted: Any) -> list[Any]:
    if wanted is None:
        return []
    # callable first: a class is a factory whatever else it can do
    alone = isinstance(wanted, Optimizer) or callable(wanted) or not isinstance(wanted, Iterable)
    return [wanted] if alone else list(wanted)


def make_all(model: nn.Module, factories: Iterable[Factory], sharded: bool) -> None:
    """Call each factory on the parameters of ``model`` and remember what it makes. If one fails the model is usable.

    Args:
        model: in its final form.
        factories: what ``split`` returned.
        sharded: whether the model is really cut: only then is refused what does not work on sharded parameters.

    Raises:
        OptimizerError: a factory made something else, or an optimizer that does not work.
    """
    model.__dict__[_MADE] = [_make(model, factory, sharded) for factory in factories]


def optimizers(model: nn.Module) -> list[Optimizer]:
    """Return the optimizers that ``optimizer=`` factories made for ``model``, in the order of the factories.

    Empty where there were none: an optimizer made before is the caller's, and is changed in place.
    """
    return list(model.__dict__.get(_MADE, ()))


def _make(model: nn.Module, factory: Factory, sharded: bool) -> Optimizer:
    optimizer = factory(list(model.named_parameters()))
    name = getattr(factory, "__name__", type(factory).__name__)
    if not isinstance(optimizer, Optimizer):
        raise OptimizerError(
            f"the factory {name} made no optimizer", got=f"a {type(optimizer).__name__}", help="return the optimizer"
        )
    names = {id(parameter): fqn for fqn, parameter in model.named_parameters()}
    entries = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    outside = [tuple(parameter.shape) for parameter in entries if id(parameter) not in names]
    if len(outside) == len(entries):
        raise OptimizerError(
            f"the factory {name} made an optimizer without a parameter of the model",
            got=f"{len(entries)} parameters",
            help="make it of the named parameters that the factory is given: those of before are gone",
        )
    if outside:
        warn_outside(optimizer, outside)
    if sharded:
        in_parts = {fqn for fqn, parameter in model.named_parameters() if isinstance(parameter, InParts)}
        check_optimizer(optimizer, names, in_parts)
    return optimizer
