"""Keep out of the trace what cannot be traced: a module's own code becomes one operator that takes whole values.

Where export cannot follow a module, the shapes it returns and the calls it makes are taken from an eager run. In the
twin its forward is replaced: the modules it calls are traced one by one on inputs of their own, and one operator stands
for its code. That operator has no dims in common with anything, so all it touches stays whole.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from autoshard._torch import quiet_fake_tensors
from autoshard.guesses import Answers, Guesses, explore
from autoshard.ir import Untraced
from autoshard.observed import Observed
from autoshard.outputs import states, tensors
from autoshard.passes import spare
from autoshard.passes.pieces import Pieces, alike, find, holds_list, written
from autoshard.quiet import quiet
from autoshard.templates import Hole, fill, holes
from autoshard.twin import make_twin

_ROWS = 3


@torch.library.custom_op("autoshard::opaque", mutates_args=())
def _opaque(taken: Sequence[Tensor], layout: str, where: str, why: str) -> list[Tensor]:
    """Stands for code that cannot be traced: takes all it could read, returns tensors of a layout."""
    return [torch.empty(shape, dtype=dtype) for shape, dtype in _parsed(layout)]


@_opaque.register_fake
def _(taken: Sequence[Tensor], layout: str, where: str, why: str) -> list[Tensor]:
    return [torch.empty(shape, dtype=dtype) for shape, dtype in _parsed(layout)]


@torch.library.custom_op("autoshard::given", mutates_args=())
def _given(layout: str, owner: str) -> Tensor:
    """Stands for a tensor that a module is called with by code that cannot be traced."""
    ((shape, dtype),) = _parsed(layout)
    return torch.empty(shape, dtype=dtype)


@_given.register_fake
def _(layout: str, owner: str) -> Tensor:
    ((shape, dtype),) = _parsed(layout)
    return torch.empty(shape, dtype=dtype)


@dataclass(frozen=True)
class Opaque:
    """The modules whose own code is not traced.

    Attributes:
        parts: by module name.
        solid: those of them whose called modules are not traced either.
        observed: the eager run that says what goes in and out; None where there are no parts.
        guesses: the answers with which the code of some of the parts is followed after all, by module name.
        spare: what modules that the forward does not call are called with all the same, by name.
        final: whether a trace passed with it: later traces must keep out the same.
    """

    parts: Mapping[str, Untraced] = field(default_factory=dict)
    solid: frozenset[str] = frozenset()
    observed: Observed | None = None
    guesses: Mapping[str, Answers] = field(default_factory=dict)
    spare: Mapping[str, Any] = field(default_factory=dict)
    final: bool = False

    @property
    def untraced(self) -> tuple[Untraced, ...]:
        """The modules whose own code is not in the graph."""
        return tuple(part for fqn, part in self.parts.items() if fqn not in self.guesses)

    def grown(self, model: nn.Module, part: Untraced) -> Opaque | None:
        """Return this with one part more, or with one that is solid; None where nothing is left to keep out."""
        fqn = part.fqn
        wrong = {one for one in self.guesses if one == fqn or fqn.startswith(one + ".") or not one}
        if wrong:  # what fake tensors could follow, export cannot
            return replace(self, guesses={one: n for one, n in self.guesses.items() if one not in wrong})
        while True:
            if self._seen(fqn) and fqn not in self.parts:
                found = {**self.parts, fqn: replace(part, fqn=fqn)}
                for other in alike(model, fqn):
                    if self._seen(other):
                        found.setdefault(other, replace(part, fqn=other))
                answers = self._explored(model, fqn)
                more = dict.fromkeys(found.keys() - self.parts.keys(), answers) if answers else {}
                return replace(self, parts=found, guesses={**self.guesses, **more})
            if fqn in self.parts and fqn not in self.solid:
                return replace(self, solid=self.solid | {fqn})
            if not fqn:
                return None
            fqn = fqn.rpartition(".")[0]

    def _explored(self, model: nn.Module, fqn: str) -> Answers | None:
        """Return the answers with which a module's code can be followed; None where there are none."""
        if self.observed is None:
            return None
        twin = make_twin(model)
        module = find(twin.model, fqn)
        seen = self.observed.calls[self.observed.of(fqn)[0]]
        if module is None or any(holds_list(one) for one in module.modules()):
            return None  # of a list, those that this run leaves out are traced with the others
        with quiet_fake_tensors(), twin.mode, torch.no_grad(), quiet():
            given = {hole.index: torch.empty(hole.shape, dtype=hole.dtype) for hole in holes(seen.arguments)}
            args, kwargs = fill(seen.arguments, given)
            return explore(module, args, kwargs, tuple(seen.heard))

    def _seen(self, fqn: str) -> bool:
        calls = self.observed.calls if self.observed is not None else ()
        return any(call.fqn == fqn and call.outputs is not None for call in calls)

    def install(self, twin: nn.Module, model: nn.Module) -> AbstractContextManager[Any]:
        """Replace the forwards of the twin's opaque modules; return what to run the twin in."""
        if self.observed is None:
            return nullcontext()
        guesses = Guesses()
        spare.install(twin, self.spare)
        pieces = Pieces(model, self.observed, self.solid)
        for fqn in self.parts:
            module = find(twin, fqn)
            if module is not None and fqn in self.guesses:
                # its forward stays the class's own: texts in it are looked for
                module.register_forward_pre_hook(partial(_begin, guesses, self.guesses[fqn]))
                module.register_forward_hook(partial(_end, guesses))
            elif module is not None:
                module.forward = _Shell(twin, module, self, pieces, fqn).wrapped()
        return guesses if self.guesses else nullcontext()

    def sometimes(self, model: nn.Module) -> frozenset[str]:
        """Return the modules that may be called for some inputs only, as opaque code decides.

        What takes the answer of the one before, in an unbroken row of one kind, is called whatever the values are.
        """
        if self.observed is None:
            return frozenset()
        pieces = Pieces(model, self.observed, self.solid)
        called = (child for fqn in self.parts for child in pieces.children(fqn) if not pieces.in_row(fqn, child))
        return frozenset((*called, *self.spare))


def _begin(guesses: Guesses, answers: Answers, *_: Any) -> None:
    guesses.begin(answers)


def _end(guesses: Guesses, *_: Any) -> None:
    guesses.end()


class _Shell:
    """What an opaque module of the twin does instead of its forward."""

    def __init__(self, twin: nn.Module, module: nn.Module, opaque: Opaque, pieces: Pieces, fqn: str) -> None:
        assert opaque.observed is not None
        self.twin = twin
        self.module = module
        self.observed = opaque.observed
        self.part = opaque.parts[fqn]
        self.pieces = pieces
        self.calls = opaque.observed.of(fqn)
        self.count = 0
        self.reads = self._reads(fqn in opaque.solid)

    def wrapped(self) -> Callable[..., Any]:
        """Return the new forward, with the old one's signature."""

        @functools.wraps(self.module.forward)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return self(args, kwargs)

        return forward

    def _reads(self, solid: bool) -> tuple[str, ...]:
        found: set[str] = set()
        inside = set(self.calls)
        for number, seen in enumerate(self.observed.calls):
            if number in inside or (solid and seen.parent in inside):
                inside.add(number)
                found |= seen.reads
        return tuple(sorted(found))

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        taken = [tensor for _, tensor in (*tensors((args, kwargs)), *states((args, kwargs)))]
        if not self.count:
            taken += self._pieces()
        held = dict(self.twin.named_parameters(remove_duplicate=False))
        taken += [held[fqn] for fqn in self.reads if fqn in held]
        seen = self.observed.calls[self.calls[min(self.count, len(self.calls) - 1)]]
        self.count += 1
        # what it returns as it was given is a hole of the arguments: here it is a new value all the same
        made = holes(seen.outputs)
        results = torch.ops.autoshard.opaque(taken, written(made), self.part.where, self.part.why)
        filled = {hole.index: tensor for hole, tensor in zip(made, results, strict=True)}
        return fill(seen.outputs, filled, (args, kwargs))

    def _pieces(self) -> list[Tensor]:
        """Trace every module it calls on inputs of its own, and return what they return."""
        found: list[Tensor] = []
        for fqn in self.pieces.children(self.part.fqn):
            module = find(self.twin, fqn)
            if module is None:
                continue
            template = self.pieces.arguments(fqn)
            inputs = {hole.index: torch.ops.autoshard.given(written([_bigger(hole)]), fqn) for hole in holes(template)}
            args, kwargs = fill(template, inputs)
            result = module(*args, **kwargs)
            found += [tensor for _, tensor in (*tensors(result), *states(result))]
        return found


def _bigger(hole: Hole) -> Hole:
    """Return the hole with some rows where the run had none; what is empty further in, such as a cache, stays so."""
    return replace(hole, shape=(_ROWS, *hole.shape[1:])) if len(hole.shape) > 1 and not hole.shape[0] else hole


def _parsed(layout: str) -> list[tuple[list[int], torch.dtype]]:
    found = []
    for text in layout.split(";") if layout else []:
        name, _, shape = text.partition(":")
        found.append(([int(size) for size in shape.split(",")] if shape else [], getattr(torch, name)))
    return found
