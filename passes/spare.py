"""Trace the modules that the forward does not call for these inputs, each like one of its class that it does call.

Experts for images, where no image was given, are used as those for text are. So such a module is called in the trace at
the end of the module that holds it, on inputs of its own like those of its model; what it returns goes nowhere. Only
where those are all the arguments there are: attention may be given the keys of another sequence.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from autoshard._torch import quiet_fake_tensors
from autoshard.inputs.invent import ValueInventor
from autoshard.ir import Traced
from autoshard.observed import Observed
from autoshard.outputs import states, tensors
from autoshard.passes.pieces import written
from autoshard.quiet import quiet
from autoshard.templates import fill, holes
from autoshard.twin import make_twin
from autoshard.user_code import ERRORS

#: Why what such a module returns stays whole.
UNCALLED = "the traced forward does not call it"


def uncalled(model: nn.Module, traced: Traced) -> dict[str, str]:
    """Return a called module of the same class, by name of each outermost module with parameters that was not called.

    Only those that are built alike but for sizes, and held by a module that was called.
    """
    called = {call.fqn for call in traced.calls}
    used = {p.fqn for p in traced.parameters if p.value}
    like: dict[Any, str] = {}
    for name, module in model.named_modules():
        if name in called and name:
            like.setdefault(_classes(module), name)
    found: dict[str, str] = {}
    for name, module in model.named_modules():
        if name in called or name.rpartition(".")[0] not in called:
            continue
        own = {f"{name}.{path}" for path, _ in module.named_parameters()}
        if not own or own & used:
            continue
        other = like.get(_classes(module))
        if other is not None and not any(name.startswith(one + ".") for one in found):
            found[name] = other
    return found


def templates(model: nn.Module, pairs: Mapping[str, str], observed: Observed) -> dict[str, Any]:
    """Return what each uncalled module is called with, by name: what its model took, where it runs on that."""
    twin = make_twin(model)
    found: dict[str, Any] = {}
    for name, other in pairs.items():
        for number in observed.of(other)[:1]:
            template = observed.calls[number].arguments
            if not _leaves_nothing(twin.model.get_submodule(name), *template):
                continue
            try:
                with quiet_fake_tensors(), twin.mode, ValueInventor(), torch.no_grad(), quiet():
                    made = {hole.index: torch.empty(hole.shape, dtype=hole.dtype) for hole in holes(template)}
                    args, kwargs = fill(template, made)
                    twin.model.get_submodule(name)(*args, **kwargs)
            except ERRORS:
                continue
            found[name] = template
    return found


def install(twin: nn.Module, wanted: Mapping[str, Any]) -> None:
    """Call each module of the twin at the end of the one that holds it."""
    names = {name for name, _ in twin.named_modules()}
    for name, template in wanted.items():
        if name in names:
            home = twin.get_submodule(name.rpartition(".")[0])
            home.register_forward_hook(partial(_call, name, twin.get_submodule(name), template))


def _call(name: str, module: nn.Module, template: Any, *_: Any) -> None:
    inputs = {hole.index: torch.ops.autoshard.given(written([hole]), name) for hole in holes(template)}
    args, kwargs = fill(template, inputs)
    result = module(*args, **kwargs)
    made = [tensor for _, tensor in (*tensors(result), *states(result))]
    torch.ops.autoshard.opaque(made, "", "", UNCALLED)


def _leaves_nothing(module: nn.Module, args: Any, kwargs: Any) -> bool:
    """Whether a call gives every argument that there is: one that another call adds would not be in the plan."""
    parameters = inspect.signature(module.forward).parameters
    starred = any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters.values())
    given = (*args, *kwargs.values())
    return not starred and len(given) == len(parameters) and all(holes(value) for value in given)


def _classes(module: nn.Module) -> tuple[Any, ...]:
    """Return the classes of the modules in one, and how many parameters each holds: what is alike but for sizes."""
    return tuple(
        (type(one), sum(p is not None for p in one._parameters.values()), len(one._modules)) for one in module.modules()
    )
