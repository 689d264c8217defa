"""What a model hands out that its trace did not: made whole where it leaves the model, and only then.

Modules in regions return shares that nobody took in the trace, attention weights for example. Each forward notes such
tensors; those that the model itself returns are converted there. A forward that does not ask for them pays nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from autoshard._torch import in_backward
from autoshard.errors import InvalidArgument
from autoshard.executor.collectives import Axis, Conversion
from autoshard.executor.sequence import CutSequence
from autoshard.outputs import tensors
from autoshard.paths import Argument, split, update

REFUSED = "refuse"


class Returned:
    """The tensors that one forward of the model may return while they are not whole.

    Attributes:
        axis: the tp axis.
        watches: whether there is anything to note.
    """

    def __init__(self, axis: Axis) -> None:
        self.axis = axis
        self.watches = False
        self._noted: dict[int, tuple[weakref.ref[Tensor], str, str]] = {}

    def watch(
        self, module: nn.Module, fqn: str, returns: Mapping[str, str], sequence: CutSequence | None = None
    ) -> None:
        """Note what ``module`` returns at each path of ``returns``; given a sequence, only while that is cut."""
        if returns:
            self.watches = True
            module.register_forward_hook(_Note(self, fqn, dict(returns), sequence))

    def watch_argument(self, module: nn.Module, argument: Argument, conversion: str, sequence: CutSequence) -> None:
        """Note what ``module`` is given, while the sequence is cut, before it is converted."""
        self.watches = True
        module.register_forward_pre_hook(
            _NoteArgument(self, argument, conversion, sequence), prepend=True, with_kwargs=True
        )

    def install(self, model: nn.Module) -> None:
        """Convert what the model returns of it; forget it when a forward ends."""
        model.register_forward_hook(self.leave)
        model.register_forward_hook(self.forget, always_call=True)

    def note(self, value: Tensor, conversion: str, at: str) -> None:
        """Remember one tensor for as long as somebody else holds it."""
        self._noted[id(value)] = (weakref.ref(value), conversion, at)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def leave(self, module: nn.Module, args: Any, answer: Any) -> Any:
        """Return the answer with every noted tensor whole; a forward hook of the model.

        Raises:
            InvalidArgument: one cannot be made whole.
        """
        if not self._noted:
            return answer
        for path, tensor in list(tensors(answer)):
            reference, conversion, at = self._noted.get(id(tensor), (None, "", ""))
            if reference is not None and reference() is tensor:
                answer = update(answer, split(path), self._change(conversion, path, at), f"the model, answer {path}")
        return answer

    def _change(self, conversion: str, path: str, at: str) -> Callable[[Tensor], Tensor]:
        if conversion == REFUSED:
            raise InvalidArgument(
                f"the model returns a rank's share that cannot be made whole: {path or 'its answer'}",
                at=at,
                help="plan with example_inputs that ask for it",
            )
        return lambda tensor: Conversion.parse(conversion)(tensor, self.axis)

    def forget(self, module: nn.Module, args: Any, answer: Any) -> None:
        """Forget everything; a forward hook of the model."""
        self._noted.clear()

    def __deepcopy__(self, memo: dict[int, Any]) -> Returned:
        memo[id(self)] = made = Returned(self.axis)
        made.watches = self.watches
        return made

    def __getstate__(self) -> dict[str, Any]:
        return {"axis": self.axis, "watches": self.watches, "_noted": {}}


class _Note:
    """A forward hook that notes outputs of one module."""

    def __init__(self, returned: Returned, fqn: str, returns: dict[str, str], sequence: CutSequence | None) -> None:
        self.returned = returned
        self.fqn = fqn
        self.returns = returns
        self.sequence = sequence

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, module: nn.Module, args: Any, answer: Any) -> None:
        """Note them; what this call does not return is left alone."""
        if in_backward():
            return  # recomputed: its answer goes nowhere
        if self.sequence is not None and not self.sequence.is_cut(self.fqn):
            return
        for path, tensor in tensors(answer):
            if path in self.returns:
                self.returned.note(tensor, self.returns[path], f"{self.fqn or 'the model'}, answer {path}".rstrip())


class _NoteArgument:
    """A forward pre-hook that notes one argument of a module."""

    def __init__(self, returned: Returned, argument: Argument, conversion: str, sequence: CutSequence) -> None:
        self.returned = returned
        self.argument = argument
        self.conversion = conversion
        self.sequence = sequence

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note it, if it is given."""
        if not in_backward() and self.sequence.is_cut(self.argument.at):
            self.argument.update(args, kwargs, self._note)

    def _note(self, value: Tensor) -> Tensor:
        self.returned.note(value, self.conversion, self.argument.at)
        return value
