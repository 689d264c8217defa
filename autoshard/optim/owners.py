"""Where parameters live: found again by owner after every parameter object of a model was replaced.

An owner is a module object and an attribute. Unlike a name it survives wrappers, and unlike an address it means
something on the meta device.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from autoshard.errors import OptimizerError


@dataclass(frozen=True, eq=False)
class Owner:
    """One place that holds a parameter: a module object and an attribute of it.

    Attributes:
        fqn: name of the parameter at this place.
        module: the module, weakly: a module that is replaced must not keep its parameters alive.
        attribute: name of the parameter within the module.
    """

    fqn: str
    module: weakref.ref[nn.Module]
    attribute: str


@dataclass(frozen=True, eq=False)
class Slot:
    """One parameter of the model as it was.

    Attributes:
        owners: every place that held it, more than one where it is tied.
        shape: global shape, in elements.
        dtype: its dtype.
        trainable: whether it took a gradient.
        old: the old parameter, weakly.
    """

    owners: tuple[Owner, ...]
    shape: torch.Size
    dtype: torch.dtype
    trainable: bool
    old: weakref.ref[Tensor]

    @property
    def fqn(self) -> str:
        """The first name of the parameter."""
        return self.owners[0].fqn


def slots_of(model: nn.Module) -> dict[int, Slot]:
    """Return the parameters of the model by ``id``, each with all its owners."""
    owners: dict[int, list[Owner]] = {}
    parameters: dict[int, Tensor] = {}
    for path, module in model.named_modules():
        for attribute, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            owner = Owner(f"{path}.{attribute}" if path else attribute, weakref.ref(module), attribute)
            owners.setdefault(id(parameter), []).append(owner)
            parameters[id(parameter)] = parameter
    return {
        key: Slot(tuple(owners[key]), parameter.shape, parameter.dtype, parameter.requires_grad, weakref.ref(parameter))
        for key, parameter in parameters.items()
    }


def find(model: nn.Module, modules: set[int], slot: Slot) -> Tensor:
    """Return the parameter that is now where ``slot`` was.

    Args:
        model: the model after the change.
        modules: ``id`` of each of its modules.
        slot: the parameter as it was. A module may have changed class; one that was replaced is found by name.

    Raises:
        OptimizerError: there is no such parameter, or its owners no longer hold the same one.
    """
    found = [_at(model, modules, owner) for owner in slot.owners]
    if any(parameter is not found[0] for parameter in found):
        raise OptimizerError(
            "a tie is broken: one parameter became several, of which one optimizer entry would train one",
            at=", ".join(owner.fqn for owner in slot.owners),
        )
    return found[0]


def _at(model: nn.Module, modules: set[int], owner: Owner) -> Tensor:
    module = owner.module()
    if module is None or id(module) not in modules:
        module = dict(model.named_modules(remove_duplicate=False)).get(owner.fqn.rpartition(".")[0])
    # not getattr: an attribute may show the local tensor in place of the parameter
    own = {} if module is None else dict(module.named_parameters(recurse=False, remove_duplicate=False))
    if owner.attribute not in own:
        raise OptimizerError(
            "the sharded model has no parameter for this optimizer entry",
            at=owner.fqn,
            help="make the optimizer after the model is parallelized",
        )
    return own[owner.attribute]
