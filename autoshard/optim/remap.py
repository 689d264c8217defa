"""Optimizers that were made before the model was sharded.

Sharding replaces every parameter. An optimizer made earlier then holds the old, full ones: its step changes nothing
that the model uses, without an error, and the full parameters stay in memory. So, in this order::

    before = snapshot(model, [optimizer])   # who owns which parameter; what cannot follow is refused
    before.release()                        # the optimizer lets go of them
    ...                                     # the model is sharded
    before.restore(model)                   # the same lists, in the same order, over the new parameters

A parameter is found again by its owner, the module object and the attribute that held it. The optimizer, its groups and
its list of groups stay the same objects, so schedulers, hooks and gradient scalers go on working.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from autoshard.errors import OptimizerError
from autoshard.optim.check import check_optimizer, check_parameters, warn_outside
from autoshard.optim.owners import Slot, find, slots_of
from autoshard.optim.state import Cut, StateMove, cut_like, elementwise_keys

_State = dict[Any, Any]


class Snapshot:
    """What a list of optimizers held, in terms of owners. Made by ``snapshot``; used once."""

    def __init__(self, slots: Sequence[Slot], held: Sequence[_Held]) -> None:
        self._slots = tuple(slots)
        self._held = tuple(held)

    def release(self) -> None:
        """Empty the optimizers in place; parameters outside the model, and their state, stay."""
        for held in self._held:
            held.release()

    def restore(self, model: nn.Module, cut: Cut = cut_like) -> None:
        """Refill the same groups, in order, with the new parameters, and cut the state as they are cut.

        Call it after ``release``, on every rank, when all parameters are in their final form. FSDP modules are
        resharded, so that the optimizer gets their sharded parameters. No communication.

        Args:
            model: the sharded model. A module may have changed class; one that was replaced is found by name.
            cut: how a state tensor of the old parameter's shape is cut; needed where the placements of a parameter do
                not say it all, such as a fused projection that is cut per part.

        Raises:
            OptimizerError: a parameter is not found, a tie is broken, or state does not fit.
        """
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        modules = {id(module) for module in model.modules()}
        new = {slot: find(model, modules, slot) for held in self._held for slot in held.slots()}
        in_model = {id(parameter) for parameter in model.parameters()}
        for held in self._held:
            held.restore(new, cut)
            held.check(new, in_model)
        # a parameter that sharding left alone is not stale
        self._slots = tuple(slot for slot in self._slots if id(slot.old()) not in in_model)

    def stale(self) -> list[tuple[str, int]]:
        """Return the old parameters that are still alive: name and bytes. Never raises; for use after ``restore``."""
        if any(slot.old() is not None for slot in self._slots):
            # what only waits for the collector is not held by anyone
            gc.collect()
        alive = ((slot, slot.old()) for slot in self._slots)
        return [(slot.fqn, 0 if old.is_meta else old.nbytes) for slot, old in alive if old is not None]


def snapshot(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    *,
    sharded: bool = True,
    in_parts: Collection[str] = frozenset(),
) -> Snapshot:
    """Record which parameter of ``model`` each optimizer holds where. Changes nothing.

    Args:
        model: the model before any change.
        optimizers: optimizers made from it; populated state is kept.
        sharded: whether the model will really be cut: only then is refused what sharding would lose.
        in_parts: names of parameters that tp will cut in parts.

    Raises:
        OptimizerError: an optimizer cannot follow its parameters, or a parameter has hooks that would be lost.
    """
    slots = slots_of(model)
    if sharded:
        check_parameters((slot.fqn, old) for slot in slots.values() if (old := slot.old()) is not None)
    held: list[_Held] = []
    for optimizer in {id(optimizer): optimizer for optimizer in optimizers}.values():
        if not isinstance(optimizer, Optimizer):
            raise OptimizerError(
                f"a {type(optimizer).__name__} is not an optimizer", help="pass torch.optim.Optimizer objects"
            )
        if sharded:
            check_optimizer(optimizer, {key: slot.fqn for key, slot in slots.items()}, in_parts)
        held.append(_Held.of(optimizer, slots))
    return Snapshot(list(slots.values()), held)


class _Held:
    """What one optimizer held."""

    def __init__(self, optimizer: Optimizer, groups: list[list[Slot | Tensor]], state: dict[Slot, _State]) -> None:
        self._optimizer = optimizer
        self._groups = groups
        self._state = state
        self._elementwise = elementwise_keys((slot.shape, values) for slot, values in state.items())

    @staticmethod
    def of(optimizer: Optimizer, slots: Mapping[int, Slot]) -> _Held:
        groups: list[list[Slot | Tensor]] = [
            [slots.get(id(parameter), parameter) for parameter in group["params"]] for group in optimizer.param_groups
        ]
        outside = [tuple(entry.shape) for group in groups for entry in group if isinstance(entry, Tensor)]
        if outside:
            warn_outside(optimizer, outside)
        state = {slots[id(key)]: values for key, values in optimizer.state.items() if id(key) in slots}
        return _Held(optimizer, groups, state)

    def slots(self) -> Iterator[Slot]:
        yield from (entry for group in self._groups for entry in group if isinstance(entry, Slot))
        yield from self._state

    def release(self) -> None:
        inside = {id(slot.old()) for slot in self.slots()}
        state = self._optimizer.state
        outside = {key: values for key, values in state.items() if id(key) not in inside}
        state.clear()
        state.update(outside)
        for group, entries in zip(self._optimizer.param_groups, self._groups, strict=True):
            # the list itself stays: LBFGS and wrappers keep a reference to it
            group["params"][:] = [entry for entry in entries if isinstance(entry, Tensor)]

    def restore(self, new: Mapping[Slot, Tensor], cut: Cut) -> None:
        on_device: set[Slot] = set()
        for group, entries in zip(self._optimizer.param_groups, self._groups, strict=True):
            group["params"][:] = [new[entry] if isinstance(entry, Slot) else entry for entry in entries]
            if group.get("fused") or group.get("capturable"):
                on_device.update(entry for entry in entries if isinstance(entry, Slot))
        for slot in list(self._state):
            move = StateMove(slot.fqn, slot.shape, slot.dtype, new[slot], slot in on_device, self._elementwise, cut)
            self._optimizer.state[new[slot]] = move(self._state.pop(slot))

    def check(self, new: Mapping[Slot, Tensor], in_model: set[int]) -> None:
        """Refuse what would train in silence something else than before."""
        now = Counter(id(entry) for group in self._optimizer.param_groups for entry in group["params"])
        before = Counter(entry for group in self._groups for entry in group if isinstance(entry, Slot))
        for slot, count in before.items():
            parameter = new[slot]
            if id(parameter) not in in_model:
                raise OptimizerError("the parameter is no longer one of the model's", at=slot.fqn)
            if now[id(parameter)] != count:
                raise OptimizerError(
                    "several parameters of the optimizer became one", at=slot.fqn, got=f"{now[id(parameter)]} entries"
                )
            if slot.trainable and not parameter.requires_grad:
                raise OptimizerError("the parameter was trainable, the one that replaced it is not", at=slot.fqn)
