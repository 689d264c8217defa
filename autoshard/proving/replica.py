"""Copies of a model around other tensors: the modules and the code are the user's, the values are not."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from autoshard.errors import TraceError

Shape = tuple[int, ...]

#: Where a module keeps what is registered with it.
_REGISTERED = frozenset(["_parameters", "_buffers", "_modules"])

#: Gives the tensor that takes another one's place, in the shape (elements) it shall have.
Fill = Callable[[Tensor, Shape], Tensor]


def replicate(
    model: nn.Module,
    fill: Fill,
    fill_buffer: Fill,
    shapes: Mapping[str, Shape] | None = None,
    dropped: Collection[str] = (),
) -> nn.Module:
    """Copy a model around new tensors, so that no second full copy is ever made; ties stay ties.

    Args:
        model: on any device; left as it is.
        fill: gives the value of a parameter.
        fill_buffer: gives the value of a buffer, and of a tensor that no module of the model has registered.
        shapes: shapes by first name of parameter or buffer, where they differ from the model's.
        dropped: names of modules that the copy shall not have; each is a child of a container.

    Raises:
        TraceError: the model cannot be copied.
    """
    shapes = shapes or {}
    memo: dict[int, object] = {id(model.get_submodule(name)): nn.Identity() for name in dropped}
    for fqn, parameter in model.named_parameters():
        if not below(fqn, dropped):
            filled = fill(parameter, shapes.get(fqn, tuple(parameter.shape)))
            memo[id(parameter)] = nn.Parameter(filled, requires_grad=parameter.requires_grad)
    for fqn, buffer in model.named_buffers():
        if not below(fqn, dropped):
            memo[id(buffer)] = fill_buffer(buffer, shapes.get(fqn, tuple(buffer.shape)))
    for tensor in _unregistered(model):
        if id(tensor) not in memo:
            filled = fill_buffer(tensor, tuple(tensor.shape))
            is_parameter = isinstance(tensor, nn.Parameter)
            memo[id(tensor)] = nn.Parameter(filled, tensor.requires_grad) if is_parameter else filled
    try:
        made: nn.Module = copy.deepcopy(model, memo)
    except (RuntimeError, TypeError, AttributeError, ValueError) as error:
        raise TraceError("the model cannot be copied", got=f"{type(error).__name__}: {error}") from error
    for name in dropped:
        container, _, key = name.rpartition(".")
        del made.get_submodule(container)._modules[key]
    _follow(made, shapes)
    return made


def _unregistered(model: nn.Module) -> Iterator[Tensor]:
    """Yield the tensors that modules hold as plain attributes: alone, in sequences and dicts, in modules in those."""
    modules = list(model.modules())
    seen = {id(module) for module in modules}
    pending: list[Any] = [v for m in modules for name, v in vars(m).items() if name not in _REGISTERED]
    while pending:
        value = pending.pop()
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple, dict, nn.Module)) and id(value) not in seen:
            seen.add(id(value))
            inner = vars(value) if isinstance(value, nn.Module) else value
            pending.extend(inner.values() if isinstance(inner, dict) else inner)


def below(fqn: str, modules: Collection[str]) -> bool:
    """Whether a name is one of ``modules`` or inside one."""
    steps = fqn.split(".")
    return any(".".join(steps[:depth]) in modules for depth in range(1, len(steps) + 1)) if modules else False


def _follow(model: nn.Module, shapes: Mapping[str, Shape]) -> None:
    """Set what torch's own modules keep beside their weight to its new shape."""
    for fqn, shape in shapes.items():
        name, _, leaf = fqn.rpartition(".")
        module = model.get_submodule(name)
        if leaf == "weight" and hasattr(module, "normalized_shape"):
            module.normalized_shape = shape  # type: ignore[assignment]
        if getattr(module, "padding_idx", None) is not None:
            module.padding_idx = None  # type: ignore[assignment]
