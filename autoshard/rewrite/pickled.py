"""Rewritten methods in pickles and copies of their module: written again from the source, when it is loaded.

Pickle holds a bound method by its name, and would find the class's own under it. So the rewritten ones have names that
no class has, and the module's own ``__reduce_ex__`` begins its pickle with what was rewritten: the empty module
gets its methods first, and then its state, in which whatever holds one of them finds it.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from types import FunctionType, MethodType
from typing import Any

from torch import nn

from autoshard.errors import PlanMismatch
from autoshard.rewrite.functions import Convert, prepare, unchanged
from autoshard.rewrite.record import CallRewrite
from autoshard.rewrite.source import NoSource

_REWRITTEN = "_autoshard_rewritten"


def install(module: nn.Module, rewrites: Sequence[CallRewrite], convert: Convert = unchanged) -> None:
    """Give a module its own edited methods, which its pickles and copies have as well.

    Args:
        module: the module; it may be empty yet.
        rewrites: what is written otherwise.
        convert: what ``convert`` means in a text that converts a value.

    Raises:
        NoSource: see ``prepare``; nothing changed.
    """
    methods = prepare(module, rewrites, convert)
    if methods:
        module.__dict__.update(methods)
        module.__dict__.update({method.__name__: method for method in methods.values()})
        module.__dict__[_REWRITTEN] = (tuple(rewrites), convert)
        module.__dict__["__reduce_ex__"] = MethodType(_reduce, module)


def _reduce(self: nn.Module, protocol: Any) -> Any:
    """Return how this module is pickled; pickle and copy look for it on the instance first."""
    parts: Any = type(self).__reduce_ex__(self, protocol)
    rebuild, args, *rest = parts
    if rest and isinstance(rest[0], dict):
        # a function is held by where it is defined, which a rewritten one is not: it is there before the state is
        rest[0] = {name: value for name, value in rest[0].items() if not _is_static(self, value)}
    elif any(_is_static(self, value) for value in vars(self).values()):
        raise pickle.PicklingError(f"{type(self).__name__} saves a state of its own: save model.state_dict() instead")
    return (_remake, (rebuild, args, *self.__dict__[_REWRITTEN]), *rest)


# by its name pickle finds the bound one again, on a module that ``_remake`` has made
_reduce.__name__ = "__reduce_ex__"


def _is_static(module: nn.Module, value: Any) -> bool:
    """Whether ``value`` is a rewritten function: its name is none that a function can be defined under."""
    is_ours = isinstance(value, FunctionType) and not value.__name__.isidentifier()
    return is_ours and vars(module).get(value.__name__) is value


def _remake(
    rebuild: Callable[..., nn.Module], args: tuple[Any, ...], rewrites: Sequence[CallRewrite], convert: Convert
) -> nn.Module:
    """Return the empty module with its methods.

    Raises:
        PlanMismatch: its source is not what it was when it was saved.
    """
    module = rebuild(*args)
    try:
        install(module, rewrites, convert)
    except NoSource as error:
        raise PlanMismatch(
            "the code of a pickled module, which was rewritten for a rank, is not what it was",
            at=f"{type(module).__name__} ({rewrites[0].where})",
            got=str(error),
            help="save model.state_dict() instead, and apply a plan to a new model",
        ) from error
    return module
