"""The modules that code outside the trace calls: which they are, which are built alike, and what each is given."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from autoshard.observed import Observed, Seen
from autoshard.templates import Hole, holes


class Pieces:
    """The modules that opaque code calls, and what each is called with in the trace."""

    def __init__(self, model: nn.Module, observed: Observed, solid: frozenset[str]) -> None:
        self.model = model
        self.observed = observed
        self.solid = solid
        self.best: dict[Any, Seen] = {}
        self.kinds: dict[str, Any] = {}
        for seen in self.observed.calls:
            known = self.best.get(self._kind(seen.fqn))
            if known is None or _numel(seen.arguments) > _numel(known.arguments):
                self.best[self._kind(seen.fqn)] = seen

    def _kind(self, fqn: str) -> Any:
        if fqn not in self.kinds:
            module = find(self.model, fqn)
            parent = find(self.model, fqn.rpartition(".")[0])
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


def written(found: Sequence[Hole]) -> str:
    """Return shapes and dtypes as one text: ``float32:2,3;int64:2``."""
    texts = [str(hole.dtype).removeprefix("torch.") + ":" + ",".join(map(str, hole.shape)) for hole in found]
    return ";".join(texts)


def find(model: nn.Module, fqn: str) -> nn.Module | None:
    """Return a module by name; None where there is none."""
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


def holds_list(module: nn.Module) -> bool:
    """Whether a module is a list or dict of modules with parameters."""
    return isinstance(module, (nn.ModuleList, nn.ModuleDict)) and any(True for _ in module.parameters())


def _siblings(model: nn.Module, fqn: str) -> list[str]:
    """Return the modules beside ``fqn`` in a list or dict that are built like it."""
    home, _, _ = fqn.rpartition(".")
    parent, own = find(model, home), find(model, fqn)
    if not isinstance(parent, (nn.ModuleList, nn.ModuleDict)) or own is None:
        return []
    wanted = _structure(own)
    names = [(f"{home}.{name}" if home else name, child) for name, child in parent.named_children()]
    return [name for name, child in names if _structure(child) == wanted]


def alike(model: nn.Module, fqn: str) -> list[str]:
    """Return the modules at the same place of other blocks that are built like ``fqn``."""
    own = find(model, fqn)
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
