"""Which parameters the ops of a stretch work with: their gradients are partial, all of them or none."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

from autoshard.ir import Op
from autoshard.passes.rules import SHAPED
from autoshard.passes.states import Placed


class Readers:
    """Which parameters an op works with, and whether each is used on stretches only."""

    def __init__(self, placed: Placed) -> None:
        traced = placed.chosen.factored.traced
        self.users = placed.chosen.index.users
        self.fqns: dict[str, str] = {}
        self.bases: dict[str, frozenset[str]] = {}
        self.weights: set[str] = set()
        self._trains: set[str] = set()
        self._matrices: set[str] = set()
        for source in traced.sources:
            if source.kind != "input":
                self.weights.add(source.name)
            if source.trainable or (source.kind == "input" and source.meta is not None and source.meta.is_float):
                self._trains.add(source.name)
            if source.kind == "parameter" and source.trainable:
                self.fqns[source.name] = source.fqn
                self.bases[source.name] = frozenset([source.name])
                if source.meta is not None and sum(size > 1 for size in source.meta.shape) > 1:
                    self._matrices.add(source.name)
        for op in traced.ops:
            refs = op.refs()
            if refs and all(name in self.weights for name in refs):
                self.weights.add(op.name)
                self.bases[op.name] = frozenset(b for name in refs for b in self.bases.get(name, ()))
            metas = op.result if isinstance(op.result, tuple) else (op.result,)
            floats = any(meta is not None and meta.is_float for meta in metas)
            detached = op.no_grad or op.target == "aten.detach" or op.target in SHAPED
            if floats and not detached and any(name in self._trains for name in refs):
                self._trains.add(op.name)

    def trains(self, value: str) -> bool:
        """Whether a gradient flows through a value."""
        return value in self._trains

    def of(self, ops: Iterable[Op]) -> Iterator[str]:
        """Yield the names of the trainable parameters that ops read."""
        for op in ops:
            for name in op.refs():
                yield from (self.fqns[base] for base in self.bases.get(name, ()))

    def torn(self, members: set[str], ops: Mapping[str, Op]) -> set[str]:
        """Return members that read a matrix, or a parameter that is used elsewhere too."""
        out: set[str] = set()
        readers: dict[str, set[str]] = defaultdict(set)
        for name in members:
            for ref in ops[name].refs():
                for base in self.bases.get(ref, ()):
                    readers[base].add(name)
        for base, names in readers.items():
            if base in self._matrices or not self._consumers(base) <= members:
                out |= names
        return out

    def _consumers(self, value: str) -> set[str]:
        """Return the ops that use a weight for something else than another weight."""
        found: set[str] = set()
        for op in self.users[value]:
            if op.name in self.weights:
                found |= self._consumers(op.name)
            elif op.target not in SHAPED:
                found.add(op.name)
        return found
