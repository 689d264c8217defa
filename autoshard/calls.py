"""Which module call each node of an exported graph belongs to, and which values enter and leave it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from autoshard._torch import GraphRecorder
from autoshard.outputs import tensors


class CallRecorder:
    """Records, while export runs, which module call each node belongs to and which nodes enter and leave it."""

    def __init__(self, twin: nn.Module, after: Callable[[str, Any], Any] | None) -> None:
        # torch hands some modules to their hooks in a wrapper, which has the module's own __dict__
        named = list(twin.named_modules(remove_duplicate=False))
        self.names = {id(vars(module)): fqn for fqn, module in reversed(named)}
        self.modules = list(twin.modules())
        self.after = after
        self.recorder = GraphRecorder()
        self.entered: list[tuple[int, nn.Module]] = []
        self.symbolic: set[int] = set()
        self.calls: list[dict[str, Any]] = []

    def attach(self) -> list[RemovableHandle]:
        """Hook every module of the twin; whoever exports removes the handles."""
        handles: list[RemovableHandle] = []
        for module in self.modules:
            handles.append(module.register_forward_pre_hook(self._enter, with_kwargs=True, prepend=True))
            handles.append(module.register_forward_hook(self._leave, with_kwargs=True))
        return handles

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.recorder.stamp(self.entered[-1][0] if self.entered else -1)
        call = {
            "id": len(self.calls),
            "fqn": self.names[id(vars(module))],
            "parent": self.entered[-1][0] if self.entered else None,
            "inputs": self._nodes(bound_arguments(module, args, kwargs)),
            "outputs": {},
            "kind": type(module).__name__,
        }
        self.calls.append(call)
        if any(type(size) is not int for _, t in tensors((args, kwargs)) for size in t.shape):
            self.symbolic.add(call["id"])
        self.entered.append((call["id"], module))

    def open_call(self) -> str | None:
        """Return the innermost module whose forward has not ended, of those called with tensors of known sizes.

        A size that depends on values was made by the caller: it is the caller that cannot be traced.
        """
        known = (module for number, module in reversed(self.entered) if number not in self.symbolic)
        return next((self.names[id(vars(module))] for module in known), None)

    def caller(self, index: int) -> str | None:
        """Return the module of call ``index``, or of the nearest one around it that was called with known sizes."""
        number: int | None = index
        while number is not None and number in self.symbolic:
            number = self.calls[number]["parent"]
        return None if number is None or number < 0 else str(self.calls[number]["fqn"])

    def _leave(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
        # an exception caught by the user's code may have left inner calls open
        while self.entered and vars(self.entered[-1][1]) is not vars(module):
            self.entered.pop()
        index, _ = self.entered.pop()
        self.recorder.stamp(index)
        self.calls[index]["outputs"] = self._nodes({"": result})
        return self.after(self.names[id(vars(module))], result) if self.after else None

    def _nodes(self, arguments: Mapping[str, Any]) -> dict[str, int]:
        found: dict[str, int] = {}
        for name, value in arguments.items():
            for path, tensor in tensors(value, name):
                mark = self.recorder.mark(tensor)
                if mark is not None:
                    found[path] = mark
        return found


def bound_arguments(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by the names of ``module.forward``'s signature.

    ``*args`` appear as ``args.0``, ``**kwargs`` under their own names.
    """
    signature = inspect.signature(module.forward)
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError:
        return {**{str(index): value for index, value in enumerate(args)}, **kwargs}
    found: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            found.update(value)
        else:
            found[name] = value
    return found
