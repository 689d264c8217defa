"""A forward that an instance has instead of its class's: no wrapper, so no name changes, and hooks stay outside."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn


class Forward:
    """Runs around the forward of one module; copies and pickles with it.

    Attributes:
        module: the module.
        own: a forward that the instance had before instead of its class's, or None.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.own: Callable[..., Any] | None = module.__dict__.get("forward")

    def install(self) -> None:
        """Take the place of the module's forward."""
        self.module.__dict__["forward"] = self

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.inner)

    # a bound method would find this object again when it is unpickled
    @property
    def inner(self) -> Callable[..., Any]:
        """The forward that is run around."""
        return self.own if self.own is not None else partial(type(self.module).forward, self.module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward; arguments and answer are the module's own."""
        return self.inner(*args, **kwargs)
