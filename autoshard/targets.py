"""What TARGET means on the command line: a file, a name in a file or package, or a model config.

Models are built on the meta device, so that one of any size costs nothing; a model whose constructor does not run
there is built as it is.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import torch
from torch import nn

from autoshard.discover import find_model, missing_arguments
from autoshard.errors import TargetError, near
from autoshard.user_code import ERRORS, blamed

_FORMS = "a target is model.py, model.py:name, package.module:name, or a model's config.json"
_FACTORY_HELP = "add a function without arguments that returns the model, and name it"


def load_model(target: str) -> nn.Module:
    """Return the model that ``target`` names.

    Args:
        target: ``model.py`` (see ``discover.find_model``), ``model.py:name``, ``package.module:name``, where the name
            is an instance, a class or a function that needs no arguments, or a ``config.json`` of transformers (or
            the folder that holds one).

    Raises:
        TargetError: the target names no model, or several, or its code failed.
    """
    path = Path(target)
    if path.is_dir() or path.suffix == ".json":
        from autoshard.hf import build_from_config

        return build_from_config(path)
    source, colon, name = target.rpartition(":") if ":" in target else (target, "", "")
    if not source or (colon and not name) or not (colon or source.endswith(".py")):
        raise TargetError(f"cannot read the target {target!r}", help=_FORMS)
    module = _import_file(Path(source)) if source.endswith(".py") else _import_module(source)
    if not name:
        return find_model(module, source, build)
    return _named(module, source, name)


def build(make: Callable[[], object], name: str) -> nn.Module:
    """Call a factory or class on the meta device, or as it is where that fails.

    Raises:
        TargetError: the call failed, or what it returned is no module.
    """
    try:
        with torch.device("meta"):
            built = make()
    except ERRORS:
        with blamed(name):
            built = make()
    if not isinstance(built, nn.Module):
        raise TargetError(f"{name} returned a {type(built).__name__}, not a torch.nn.Module", help=_FACTORY_HELP)
    return built


def _named(module: ModuleType, source: str, name: str) -> nn.Module:
    """Return the model that ``name`` is or makes."""
    value = getattr(module, name, None)
    if value is None:
        known = [key for key, item in vars(module).items() if callable(item) and not key.startswith("_")]
        raise TargetError(f"{source} has no {name!r}", help=near(name, known))
    if isinstance(value, nn.Module):
        return value
    if not callable(value):
        raise TargetError(
            f"{name} is a {type(value).__name__}", at=source, help="name a torch.nn.Module, its class or a factory"
        )
    missing = missing_arguments(value)
    if missing:
        raise TargetError(f"{name} needs arguments", at=source, got=", ".join(missing), help=_FACTORY_HELP)
    return build(value, name)


def _import_file(path: Path) -> ModuleType:
    """Run a Python file as a module, with its folder importable as if it were run as a script."""
    if not path.is_file():
        others = sorted(one.name for one in path.parent.glob("*.py"))
        raise TargetError(f"there is no file {path}", help=near(path.name, others) if others else _FORMS)
    # a name of its own: a file called like an installed package must not take its place
    name = f"autoshard_target_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise TargetError(f"cannot import {path}", help=_FORMS)
    sys.path.insert(0, str(path.resolve().parent))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    with blamed(str(path)):
        spec.loader.exec_module(module)
    return module


def _import_module(name: str) -> ModuleType:
    """Import a module by its dotted name, from the working folder too."""
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    with blamed(name):
        return importlib.import_module(name)
