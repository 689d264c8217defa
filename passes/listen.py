"""Hear which modules draw random numbers in training, where the model was traced in another mode.

Code that drops nothing in eval mode (attention that passes on a probability of zero) looks there as if it never did. So
a twin runs once in training mode, on fake tensors, and every operator that draws is heard.
"""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from autoshard._torch import TorchDispatchMode
from autoshard.exported import containers_of
from autoshard.ir import Traced
from autoshard.observed import fakes
from autoshard.passes.unroll import find_repeats
from autoshard.quiet import quiet
from autoshard.twin import make_twin


def draws_in_training(model: nn.Module, traced: Traced) -> Counter[str]:
    """Return how often the own code of each module draws random numbers in a forward in training mode, by name.

    Nothing where the model is in that mode already: the trace has seen it. What comes after code that does not run on
    fake tensors is not heard.

    Args:
        model: the model; it is left alone.
        traced: its trace, for the inputs and the blocks that were traced once for several.
    """
    if model.training:
        return Counter()
    repeats = find_repeats(model, containers_of(model)) if traced.copies else ()
    twin = make_twin(model, {}, {one.container: one.kept for one in repeats})
    around = nullcontext() if traced.inputs.opaque is None else traced.inputs.opaque.install(twin.model, model)
    args, kwargs = fakes((traced.inputs.args, traced.inputs.kwargs), twin)
    heard = _Heard()
    heard.follow(twin.model.train())
    with twin.mode, heard, around, torch.no_grad(), quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # whatever the user's code raises in training is theirs to see when they train
        with contextlib.suppress(Exception):
            twin.model(*args, **kwargs)
    found = Counter(heard.modules)
    for copy, block in traced.copies.items():
        for name, times in heard.modules.items():
            if name == block or name.startswith(block + "."):
                found[copy + name.removeprefix(block)] = times
    return found


class _Heard(TorchDispatchMode):
    """Notes the innermost module that runs when an operator draws."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.modules: Counter[str] = Counter()
        self._running: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (
            torch.Tag.nondeterministic_seeded in function.tags
            and self._running
            and _draws(function, args, kwargs or {})
        ):
            self.modules[self._running[-1]] += 1
        return function(*args, **(kwargs or {}))

    def follow(self, model: nn.Module) -> None:
        """Follow which modules run."""

        def enter(name: str, module: nn.Module, args: Any) -> None:
            self._running.append(name)

        def leave(module: nn.Module, args: Any, answer: Any) -> None:
            self._running.pop()

        for name, module in model.named_modules():
            module.register_forward_pre_hook(partial(enter, name), prepend=True)
            module.register_forward_hook(leave, always_call=True)


def _draws(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operator that may draw does: kernels of attention drop nothing where the probability is zero."""
    for position, argument in enumerate(function._schema.arguments):
        if argument.name in ("dropout_p", "p"):
            given = args[position] if position < len(args) else kwargs.get(argument.name, argument.default_value)
            return not isinstance(given, (int, float)) or given > 0
    return True
