"""The sequence cut over tp between regions, in training: whether it is, decided once per forward of the model.

A forward with gradients runs with the sequence cut. Under ``torch.no_grad()`` it stays whole, so that a model decodes
token by token; conversions are then those of plain tensor parallelism. Each conversion asks here which it is. What is
run again in backward (activation checkpointing) belongs to a forward with gradients. A gradient that would run
through conversions of a whole sequence is refused: parameters between regions would have it once per rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from autoshard._torch import in_backward
from autoshard.errors import InvalidArgument
from autoshard.executor.collectives import Axis
from autoshard.outputs import tensors
from autoshard.paths import Argument

_HELP = "call the model itself, or plan with --no-sequence-parallel"


class CutSequence:
    """Whether the sequence is cut right now.

    Attributes:
        axis: the tp axis.
        dims: arguments of the model, with the dim, that the sequence is cut along.
    """

    def __init__(self, axis: Axis, dims: Mapping[str, int]) -> None:
        self.axis = axis
        self.dims = dict(dims)
        self._running: list[bool] = []
        self._lengths: set[int] = set()

    def install(self, model: nn.Module, cut: Iterable[int]) -> None:
        """Decide at the start of each forward of ``model``, before anything else; call it after all other hooks.

        Args:
            model: the model.
            cut: the dims, counted from the end, that values between regions are cut along.

        Raises:
            PlanMismatch: its forward has no such argument.
        """
        self._arguments = [(Argument(model, path, ""), dim) for path, dim in self.dims.items()]
        self._cut = frozenset(cut)
        model.register_forward_pre_hook(self.begin, with_kwargs=True, prepend=True)
        model.register_forward_hook(self.check_answer)
        model.register_forward_hook(self.end, always_call=True)

    def guard(self, module: nn.Module, fqn: str) -> None:
        """Refuse to train ``module``, whose parameters have partial gradients, outside of a forward of the model."""
        module.register_forward_pre_hook(Guard(self, fqn))

    def begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Decide; a forward pre-hook of the model.

        Raises:
            InvalidArgument: the sequence is to be cut and tp does not divide its length.
        """
        cut = torch.is_grad_enabled()
        self._running.append(cut)
        self._lengths.clear()
        for argument, dim in self._arguments if cut else ():
            argument.update(args, kwargs, partial(self._check, argument=argument, dim=dim))

    def end(self, module: nn.Module, args: Any, answer: Any) -> None:
        """Forget; a forward hook of the model."""
        if self._running:
            self._running.pop()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def check_answer(self, module: nn.Module, args: Any, answer: Any) -> None:
        """Refuse an answer with a rank's part of the sequence in it; a forward hook of the model.

        What modules return and are given is made whole before. What the model's own code made, and did not return when
        it was traced, shows by a length alone: that of a part where values are cut, and of no whole sequence.

        Raises:
            InvalidArgument: there is one.
        """
        parts = {length // self.axis.size for length in self._lengths}
        for path, tensor in tensors(answer) if self._running and self._running[-1] else ():
            places = (dim for dim in self._cut if tensor.dim() > 2 and -dim <= tensor.dim())
            if any(tensor.shape[dim] in parts for dim in places) and self._lengths.isdisjoint(tensor.shape):
                raise InvalidArgument(
                    f"the model returns a rank's part of the sequence: {path or 'its answer'}",
                    at="the model",
                    got=f"shape {tuple(tensor.shape)}; allowed: a length of {', '.join(map(str, self._lengths))}",
                    help="plan with example_inputs that ask for it, or with --no-sequence-parallel",
                )

    def _check(self, value: Tensor, argument: Argument, dim: int) -> Tensor:
        length, size = value.shape[dim], self.axis.size
        self._lengths.add(length)
        if length % size:
            raise InvalidArgument(
                f"cannot cut a sequence of {length} over {size} tensor-parallel ranks",
                at=argument.at,
                got=f"length {length} (dim {dim}); allowed: a multiple of {size}, such as {length + -length % size}",
                help="pad the batch to such a length, run without gradients under torch.no_grad(), or plan with "
                "--no-sequence-parallel",
            )
        return value

    def is_cut(self, at: str) -> bool:
        """Whether the sequence is cut in what runs now.

        Args:
            at: who asks, for messages.

        Raises:
            InvalidArgument: it is whole, and gradients are wanted.
        """
        if self._running:
            cut = self._running[-1]
        else:
            cut = torch.is_grad_enabled() if torch.compiler.is_compiling() else in_backward()
        if not cut and torch.is_grad_enabled():
            raise InvalidArgument(
                "gradients are wanted outside of a forward of the model that has them",
                at=at,
                got=f"grad mode on, the sequence whole; allowed: a sequence cut over {self.axis.size} tp ranks",
                help=_HELP,
            )
        return cut


class Guard:
    """A forward pre-hook of a module whose parameters have partial gradients while the sequence is cut."""

    def __init__(self, sequence: CutSequence, fqn: str) -> None:
        self.sequence = sequence
        self.fqn = fqn

    def __call__(self, module: nn.Module, args: Any) -> None:
        """Refuse a call of its own that wants gradients."""
        self.sequence.is_cut(self.fqn)


class InBothModes:
    """A conversion that is another one while the sequence is cut.

    Attributes:
        whole: while the sequence is whole; None for none.
        cut: while it is cut; None for none.
    """

    def __init__(
        self,
        sequence: CutSequence,
        at: str,
        whole: Callable[[Tensor], Tensor] | None,
        cut: Callable[[Tensor], Tensor] | None,
    ) -> None:
        self.sequence = sequence
        self.at = at
        self.whole = whole
        self.cut = cut

    def __call__(self, value: Tensor) -> Tensor:
        """Return ``value`` converted."""
        change = self.cut if self.sequence.is_cut(self.at) else self.whole
        return value if change is None else change(value)
