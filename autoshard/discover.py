"""Which model a Python file is about, when its name is not given.

An instance beats a factory, a factory beats a class: the more specific is what the author meant to be used.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Iterable
from types import FunctionType, ModuleType

from torch import nn

from autoshard.errors import TargetError

Build = Callable[[Callable[[], object], str], nn.Module]


def find_model(module: ModuleType, source: str, build: Build) -> nn.Module:
    """Return the one model of a module.

    Looked at in this order, names with a leading underscore left out: instances of ``nn.Module`` that hold
    parameters; functions of the file that need no arguments and are annotated to return a module, or are named in
    ``__all__``; classes of the file that need no arguments. Parts of another candidate are not candidates.

    Args:
        module: the imported file.
        source: its path, for messages.
        build: makes a model from a factory or class.

    Raises:
        TargetError: there is no model, or several.
    """
    public = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    instances = _outermost({name: value for name, value in public.items() if isinstance(value, nn.Module)}, id)
    if instances:
        return instances[_one(instances, source)]
    factories = {name: value for name, value in public.items() if _is_factory(value, name, module)}
    if factories:
        name = _one(factories, source)
        return build(factories[name], name)
    own = {name: value for name, value in public.items() if _is_own_class(value, module)}
    made = {name: build(value, name) for name, value in own.items() if not missing_arguments(value)}
    outermost = _outermost(made, type)
    if outermost:
        return outermost[_one(outermost, source)]
    needy = [f"{name} needs {', '.join(missing_arguments(value))}" for name, value in own.items() if name not in made]
    raise TargetError(
        f"there is no model in {source}",
        got="; ".join(needy) or "no torch.nn.Module, no function that is annotated to return one",
        help="add a function without arguments that returns the model: def make_model() -> nn.Module",
    )


def missing_arguments(value: Callable[..., object]) -> list[str]:
    """Return the names of the arguments that a call must give."""
    try:
        parameters = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):  # some builtins do not say
        return []
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [one.name for one in parameters if one.default is one.empty and one.kind not in variadic]


def _one(names: Iterable[str], source: str) -> str:
    """Return the only name there is."""
    names = sorted(names)
    if len(names) > 1:
        raise TargetError(
            f"{source} has {len(names)} models", got=", ".join(names), help=f"name one: {source}:{names[0]}"
        )
    return names[0]


def _outermost(models: dict[str, nn.Module], key: Callable[[nn.Module], object]) -> dict[str, nn.Module]:
    """Keep the models that hold parameters and are not a part of another one, under one name each.

    Args:
        models: the candidates by name.
        key: what makes two modules the same: ``id`` for instances, ``type`` for classes.
    """
    names = {key(model): name for name, model in reversed(models.items())}
    parts = {key(part) for model in models.values() for part in model.modules() if key(part) != key(model)}
    return {
        name: models[name]
        for identity, name in names.items()
        if identity not in parts and next(models[name].parameters(), None) is not None
    }


def _is_own_class(value: object, module: ModuleType) -> bool:
    return isinstance(value, type) and issubclass(value, nn.Module) and value.__module__ == module.__name__


def _is_factory(value: object, name: str, module: ModuleType) -> bool:
    """Tell whether a function of this file promises a module and needs no arguments."""
    if not isinstance(value, FunctionType) or value.__module__ != module.__name__ or missing_arguments(value):
        return False
    try:
        promised = typing.get_type_hints(value).get("return")
    except (NameError, AttributeError, TypeError):  # a name that only a type checker can see
        promised = None
    if promised is None:
        return name in getattr(module, "__all__", ())
    return isinstance(promised, type) and issubclass(promised, nn.Module)
