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
        self.names = {module: fqn for fqn, module in reversed(list(twin.named_modules(remove_duplicate=False)))}
        self.after = after
        self.recorder = GraphRecorder()
        self.entered: list[tuple[int, nn.Module]] = []
        self.calls: list[dict[str, Any]] = []

    def attach(self) -> list[RemovableHandle]:
        """Hook every module of the twin; whoever exports removes the handles."""
        handles: list[RemovableHandle] = []
        for module in self.names:
            handles.append(module.register_forward_pre_hook(self._enter, with_kwargs=True, prepend=True))
            handles.append(module.register_forward_hook(self._leave, with_kwargs=True))
        return handles

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.recorder.stamp(self.entered[-1][0] if self.entered else -1)
        call = {
            "id": len(self.calls),
            "fqn": self.names[module],
            "parent": self.entered[-1][0] if self.entered else None,
            "inputs": self._nodes(bound_arguments(module, args, kwargs)),
            "outputs": {},
            "kind": type(module).__name__,
        }
        self.calls.append(call)
        self.entered.append((call["id"], module))

    def _leave(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
        # an exception caught by the user's code may have left inner calls open
        while self.entered and self.entered[-1][1] is not module:
            self.entered.pop()
        index, _ = self.entered.pop()
        self.recorder.stamp(index)
        self.calls[index]["outputs"] = self._nodes({"": result})
        return self.after(self.names[module], result) if self.after else None

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
