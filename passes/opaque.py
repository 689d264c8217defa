"""Keep out of the trace what cannot be traced: a module's own code becomes one operator that takes whole values.

Where export cannot follow a module, the shapes it returns and the calls it makes are taken from an eager run. In the
twin its forward is replaced: the modules it calls are traced one by one on inputs of their own, and one operator stands
for its code. That operator has no dims in common with anything, so all it touches stays whole.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from autoshard._torch import quiet_fake_tensors
from autoshard.guesses import Answers, Guesses, explore
from autoshard.ir import Untraced
from autoshard.observed import Observed, Seen
from autoshard.outputs import states, tensors
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
        final: whether a trace passed with it: later traces must keep out the same.
    """

    parts: Mapping[str, Untraced] = field(default_factory=dict)
    solid: frozenset[str] = frozenset()
    observed: Observed | None = None
    guesses: Mapping[str, Answers] = field(default_factory=dict)
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
                for other in _alike(model, fqn):
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
        module = _find(twin.model, fqn)
        seen = self.observed.calls[self.observed.of(fqn)[0]]
        if module is None:
            return None
        with quiet_fake_tensors(), twin.mode, torch.no_grad(), quiet():
            given = {hole.index: torch.empty(hole.shape, dtype=hole.dtype) for hole in holes(seen.arguments)}
            args, kwargs = fill(seen.arguments, given)
            return explore(module, args, kwargs, tuple(seen.heard))

    def _seen(self, fqn: str) -> bool:
        calls = self.observed.calls if self.observed is not None else ()
        return any(call.fqn == fqn and call.outputs is not None for call in calls)

    def install(self, twin: nn.Module, model: nn.Module) -> None:
        """Replace the forwards of the twin's opaque modules."""
        if self.observed is None:
            return
        pieces = _Pieces(model, self)
        for fqn in self.parts:
            module = _find(twin, fqn)
            if module is not None and fqn in self.guesses:
                _answered(module, self.guesses[fqn])
            elif module is not None:
                module.forward = _Shell(twin, module, self, pieces, fqn).wrapped()

    def sometimes(self, model: nn.Module) -> frozenset[str]:
        """Return the modules that may be called for some inputs only, as opaque code decides.

        What takes the answer of the one before, in an unbroken row of one kind, is called whatever the values are.
        """
        if self.observed is None:
            return frozenset()
        pieces = _Pieces(model, self)
        return frozenset(child for fqn in self.parts for child in pieces.children(fqn) if not pieces.in_row(fqn, child))


def _answered(module: nn.Module, answers: Answers) -> None:
    """Answer every question for values in a module's forward, which stays the class's own."""
    running: list[Guesses] = []

    def enter(*_: Any) -> None:
        running.append(Guesses(answers))
        running[-1].__enter__()

    def leave(*_: Any) -> None:
        running.pop().__exit__(None, None, None)

    module.register_forward_pre_hook(enter)
    module.register_forward_hook(leave, always_call=True)


class _Pieces:
    """The modules that opaque code calls, and what each is called with in the trace."""

    def __init__(self, model: nn.Module, opaque: Opaque) -> None:
        assert opaque.observed is not None
        self.model = model
        self.observed = opaque.observed
        self.solid = opaque.solid
        self.best: dict[Any, Seen] = {}
        self.kinds: dict[str, Any] = {}
        for seen in self.observed.calls:
            known = self.best.get(self._kind(seen.fqn))
            if known is None or _numel(seen.arguments) > _numel(known.arguments):
                self.best[self._kind(seen.fqn)] = seen

    def _kind(self, fqn: str) -> Any:
        if fqn not in self.kinds:
            module = _find(self.model, fqn)
            parent = _find(self.model, fqn.rpartition(".")[0])
            # siblings in a list, and their like in other blocks
            place = re.sub(r"\d+", "*", fqn) if not isinstance(parent, nn.ModuleDict) else fqn.rpartition(".")[0]
            self.kinds[fqn] = (place, _structure(module) if module is not None else None)
        return self.kinds[fqn]

    def children(self, fqn: str) -> tuple[str, ...]:
        """Return the modules that an opaque one calls, with their siblings that it happened not to call."""
        if fqn in self.solid:
            return ()
        found: dict[str, None] = {}
        for number in self.observed.of(fqn):
            for seen in self.observed.calls:
                if seen.parent == number and seen.fqn not in found:
                    found[seen.fqn] = None
                    found |= dict.fromkeys(_siblings(self.model, seen.fqn))
        return tuple(found)

    def arguments(self, fqn: str) -> Any:
        """Return the template of the arguments a module is traced with."""
        best = self.best[self._kind(fqn)]
        own = [seen for seen in self.observed.calls if seen.fqn == fqn]
        if own and _form(own[0].arguments) != _form(best.arguments):
            best = max(own, key=lambda seen: _numel(seen.arguments))
        return best.arguments

    def in_row(self, fqn: str, child: str) -> bool:
        """Whether every module like ``child`` that ``fqn`` calls is called once, on what the one before returned."""
        row = [c for c in self.children(fqn) if self._kind(c) == self._kind(child)]
        numbers = [self.observed.of(c) for c in row]
        if len(row) < 2 or any(len(found) != 1 for found in numbers):
            return False
        order = sorted(found[0] for found in numbers)
        return all(one in self.observed.calls[two].follows for one, two in itertools.pairwise(order))


class _Shell:
    """What an opaque module of the twin does instead of its forward."""

    def __init__(self, twin: nn.Module, module: nn.Module, opaque: Opaque, pieces: _Pieces, fqn: str) -> None:
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
        results = torch.ops.autoshard.opaque(taken, _written(made), self.part.where, self.part.why)
        filled = {hole.index: tensor for hole, tensor in zip(made, results, strict=True)}
        return fill(seen.outputs, filled, (args, kwargs))

    def _pieces(self) -> list[Tensor]:
        """Trace every module it calls on inputs of its own, and return what they return."""
        found: list[Tensor] = []
        for fqn in self.pieces.children(self.part.fqn):
            module = _find(self.twin, fqn)
            if module is None:
                continue
            template = self.pieces.arguments(fqn)
            inputs = {hole.index: torch.ops.autoshard.given(_written([_bigger(hole)]), fqn) for hole in holes(template)}
            args, kwargs = fill(template, inputs)
            result = module(*args, **kwargs)
            found += [tensor for _, tensor in (*tensors(result), *states(result))]
        return found


def _bigger(hole: Hole) -> Hole:
    """Return the hole with some rows where the run had none; what is empty further in, such as a cache, stays so."""
    return replace(hole, shape=(_ROWS, *hole.shape[1:])) if len(hole.shape) > 1 and not hole.shape[0] else hole


def _written(found: Sequence[Hole]) -> str:
    texts = [str(hole.dtype).removeprefix("torch.") + ":" + ",".join(map(str, hole.shape)) for hole in found]
    return ";".join(texts)


def _parsed(layout: str) -> list[tuple[list[int], torch.dtype]]:
    found = []
    for text in layout.split(";") if layout else []:
        name, _, shape = text.partition(":")
        found.append(([int(size) for size in shape.split(",")] if shape else [], getattr(torch, name)))
    return found


def _find(model: nn.Module, fqn: str) -> nn.Module | None:
    for step in fqn.split(".") if fqn else ():
        child = model._modules.get(step)
        if child is None:
            return None
        model = child
    return model


def _structure(module: nn.Module) -> tuple[Any, ...]:
    """Return the classes of a module and those in it, and the shapes they hold."""
    rows = []
    for name, one in module.named_modules():
        held = [*one._parameters.items(), *one._buffers.items()]
        rows.append((name, type(one), tuple((k, tuple(t.shape), t.dtype) for k, t in held if t is not None)))
    return tuple(rows)


def _siblings(model: nn.Module, fqn: str) -> list[str]:
    """Return the modules beside ``fqn`` in a list or dict that are built like it."""
    home, _, _ = fqn.rpartition(".")
    parent, own = _find(model, home), _find(model, fqn)
    if not isinstance(parent, (nn.ModuleList, nn.ModuleDict)) or own is None:
        return []
    wanted = _structure(own)
    names = [(f"{home}.{name}" if home else name, child) for name, child in parent.named_children()]
    return [name for name, child in names if _structure(child) == wanted]


def _alike(model: nn.Module, fqn: str) -> list[str]:
    """Return the modules at the same place of other blocks that are built like ``fqn``."""
    own = _find(model, fqn)
    if own is None or not re.search(r"\d", fqn):
        return []
    pattern, wanted = re.sub(r"\d+", "*", fqn), _structure(own)
    return [
        name
        for name, module in model.named_modules()
        if re.sub(r"\d+", "*", name) == pattern and type(module) is type(own) and _structure(module) == wanted
    ]


def _numel(template: Any) -> int:
    return sum(torch.Size(hole.shape).numel() for hole in holes(template))


def _form(template: Any) -> Any:
    return [(len(hole.shape), hole.dtype) for hole in holes(template)]
