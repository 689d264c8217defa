"""Where each leaf occurs: in which values, parameters and sums of a graph. Built once; asked by the choice of cuts."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from autoshard.dtypes import dtype_bytes
from autoshard.ir import Op, Tensor
from autoshard.passes.factorise import Factored
from autoshard.passes.factors import (
    Block,
    Factor,
    Ways,
    count,
    cut_parts,
    flat,
    least_ways,
    leaves,
    most_ways,
    parts,
    whole_cut,
)

#: The kind of a sum or mean whose result nothing takes, such as averaged attention weights that are not asked for.
UNUSED = "unused"
IS_INPUT, IS_CONSTANT = "an input of the model has it", "a constant tensor in the code has it"


@dataclass(frozen=True)
class Division:
    """How one dim of a parameter is divided.

    Attributes:
        dim: the dim.
        pieces: ``(offset, length, ways)``, tiling the dim; each is cut evenly over that many ranks, 0 for a whole one.
        degree: tp ranks.
    """

    dim: int
    pieces: tuple[tuple[int, int, int], ...]
    degree: int

    @property
    def even(self) -> bool:
        """Whether it is one even cut of the whole dim over all ranks."""
        return len(self.pieces) == 1 and self.pieces[0][2] == self.degree

    @property
    def mixed(self) -> bool:
        """Whether some pieces are on more than one rank."""
        return any(ways != self.degree for _, _, ways in self.pieces)

    @property
    def share(self) -> float:
        """The share of the dim that no other rank has."""
        return sum(n for _, n, ways in self.pieces if ways == self.degree) / sum(n for _, n, _ in self.pieces)

    def over(self, degree: int) -> Division:
        """Return the same pieces over another number of ranks; those that are cut are cut over all of them."""
        return Division(self.dim, tuple((o, n, degree if ways else 0) for o, n, ways in self.pieces), degree)


class Occurrences:
    """Where each leaf occurs in a graph."""

    def __init__(self, factored: Factored) -> None:
        self.factored = factored
        traced = factored.traced
        self.parameter: dict[str, Tensor] = {p.fqn: p for p in traced.parameters}
        self.held: dict[str, Tensor] = self.parameter | {b.fqn: b for b in traced.buffers}
        self.parameter_bytes = sum(p.meta.numel * dtype_bytes(p.meta.dtype) for p in traced.parameters)
        buffer_of = {b.value: b.fqn for b in traced.buffers if b.value}
        self.by_value: dict[str, Tensor] = {p.value: p for p in traced.parameters if p.value}
        self.places: dict[Factor, list[tuple[str, int]]] = defaultdict(list)
        self.in_parameters: dict[Factor, list[tuple[str, int]]] = defaultdict(list)
        self.in_buffers: dict[Factor, dict[str, None]] = defaultdict(dict)
        for value in factored.dims:
            for number, dims in enumerate(factored.tensors(value)):
                for leaf in dict.fromkeys(leaf for dim in dims for leaf in leaves(dim)):
                    self.places[leaf].append((value, number))
            if value in self.by_value:
                for i, dim in enumerate(factored.single(value)):
                    for leaf in dict.fromkeys(leaves(dim)):
                        self.in_parameters[leaf].append((self.by_value[value].fqn, i))
            elif value in buffer_of:
                for dim in factored.single(value):
                    for leaf in leaves(dim):
                        self.in_buffers[leaf][buffer_of[value]] = None
        self.candidates = sorted((leaf for leaf in self.in_parameters if leaf.size > 1), key=lambda f: f.serial)
        self.metas = traced.metas()
        self.returned = {value for call in traced.calls for value in call.outputs.values()}
        self.returned |= {output.value for output in traced.outputs}
        self.users: dict[str, list[Op]] = defaultdict(list)
        self.ops: dict[str, Op] = {}
        for op in traced.ops:
            self.ops[op.name] = op
            for name in dict.fromkeys(op.refs()):
                self.users[name].append(op)
        self.contracted: dict[Factor, list[tuple[str, Factor, str]]] = defaultdict(list)
        self.contracting: dict[str, list[tuple[Factor, str]]] = defaultdict(list)
        used = self._used()
        for item in factored.contractions:
            self.contracting[item.op].append((item.factor, item.kind))
            kind = UNUSED if item.kind in ("sum", "mean") and item.op not in used else item.kind
            for leaf in dict.fromkeys(leaves(item.factor)):
                self.contracted[leaf].append((item.op, item.factor, kind))
        self._escapes: dict[Factor, list[Block]] = defaultdict(list)
        self._find_escapes()

    def _used(self) -> set[str]:
        """Return the values that what the model returns, or keeps, is made of."""
        used = {output.value for output in self.factored.traced.outputs}
        for op in reversed(self.factored.traced.ops):
            if op.name in used or op.mutates:
                used.update((op.name, *op.refs()))
        return used

    def _find_escapes(self) -> None:
        """Note leaves that an input, an output or a constant of the model holds: those stay whole."""
        traced, single = self.factored.traced, self.factored.single
        whole = {"input": IS_INPUT, "constant": IS_CONSTANT}
        for source in traced.sources:
            if source.kind in whole:
                self._note(single(source.name), Block(whole[source.kind], source.fqn))
        for output in traced.outputs:
            if not output.state:
                op = self.ops.get(output.value)
                why = f"the model returns it ({output.path or 'its result'})"
                self._note(single(output.value), Block(why, output.path, op.where if op else ""))

    def _note(self, dims: Iterable[Factor], reason: Block) -> None:
        for dim in dims:
            for leaf in leaves(dim):
                self._escapes[leaf].append(reason)

    def escapes(self, leaf: Factor) -> list[Block]:
        """Return why a leaf must stay whole where it enters or leaves the model."""
        return self._escapes.get(leaf, [])

    def parameters_of(self, leaf: Factor) -> list[tuple[str, int]]:
        """Return the parameters that have a leaf, with the dim."""
        return self.in_parameters[leaf]

    def buffers_of(self, cut: frozenset[Factor]) -> list[str]:
        """Return the buffers that have one of the leaves."""
        return list(dict.fromkeys(fqn for leaf in sorted(cut, key=lambda f: f.serial) for fqn in self.in_buffers[leaf]))

    def below(self, leaf: Factor) -> Factor | None:
        """Return the leaf right below ``leaf`` in a dim of a parameter; None where there is none."""
        for fqn, dim in self.in_parameters[leaf]:
            factors = flat(self.factored.single(self.parameter[fqn].value or "")[dim])
            for one, following in itertools.pairwise(factors):
                if one is leaf and following.kind == "leaf" and following.size > 1:
                    return following
        return None

    def tensors_of(self, cut: frozenset[Factor]) -> dict[str, int]:
        """Return the dim by name of each parameter that has one of the leaves."""
        found: dict[str, int] = {}
        for leaf in sorted(cut, key=lambda f: f.serial):
            for fqn, dim in self.in_parameters[leaf]:
                found.setdefault(fqn, dim)
        return found

    def close(self, leaf: Factor, degree: int) -> frozenset[Factor] | Block:
        """Return the leaves that must be cut with ``leaf``: every part of a concatenation that is summed over."""
        cut = {leaf}
        pending = [leaf]
        while pending:
            for op, factor, _ in self.contracted.get(pending.pop(), ()):
                for piece in parts(factor):
                    if whole_cut(piece, frozenset(cut)):
                        continue
                    more = [f for f in leaves(piece) if f not in cut and self._free(f, degree)]
                    if not more:
                        why = "a part of what is summed over cannot be cut with it"
                        return Block(why, op, self.ops[op].where)
                    more.sort(key=lambda f: (f.size != leaf.size, f.serial))
                    cut.add(more[0])
                    pending.append(more[0])
        return frozenset(cut)

    def _free(self, leaf: Factor, degree: int) -> bool:
        return leaf.size % degree == 0 and leaf.size > 1 and not leaf.blocks and not self.escapes(leaf)

    def twice(self, cut: frozenset[Factor], ways: Ways, degree: int) -> Block | None:
        """Return why a cut is impossible: it would cut one tensor twice, or sum over what the result keeps."""
        for value, number in dict.fromkeys(p for leaf in cut for p in self.places[leaf]):
            if self._again(self.factored.tensors(value)[number], cut, ways, degree):
                return Block("one tensor would be cut along two dims", "", self.where(value))
        for leaf in cut:
            for op, factor, _ in self.contracted.get(leaf, ()):
                if any(count(d, cut) for dims in self.factored.tensors(op) for d in dims):
                    return Block("an op would sum over it and keep it", "", self.where(op))
                if least_ways(factor, cut, ways) != degree:
                    return Block("only some of what is summed over would be cut", "", self.where(op))
        return None

    def _again(self, dims: Iterable[Factor], cut: frozenset[Factor], ways: Ways, degree: int) -> bool:
        """Whether a tensor with some dims would be cut along two of them, or twice along one."""
        if sum(count(dim, cut) for dim in dims) < 2:
            return False
        twice = any(sum(count(dim, frozenset([leaf])) for dim in dims) > 1 for leaf in cut)
        return twice or ranks_of(dims, cut, ways) > degree

    def where(self, value: str) -> str:
        """Return the user's ``file:line`` of a value."""
        return self.ops[value].where if value in self.ops else ""

    def division(self, fqn: str, cut: frozenset[Factor], ways: Ways, degree: int) -> Division | None:
        """Return how the leaves divide a tensor; None where they do not, or only in scattered places."""
        for dim, extent in enumerate(self.factored.single(self.held[fqn].value or "")):
            if count(extent, cut):
                pieces = cut_parts(extent, cut, ways)
                return None if pieces is None else Division(dim, tuple(pieces), degree)
        return None

    def looks_up(self, op: Op, leaf: Factor) -> bool:
        """Whether ``op`` picks rows of a table whose rows are ``leaf``."""
        return any(
            kind == "lookup" and count(factor, frozenset([leaf])) for factor, kind in self.contracting.get(op.name, ())
        )

    def bytes_of(self, divisions: Mapping[str, Division]) -> int:
        """Return the parameter bytes that are divided."""
        total = 0.0
        for fqn, division in divisions.items():
            if fqn not in self.parameter:
                continue
            meta = self.parameter[fqn].meta
            total += math.prod(meta.shape) * dtype_bytes(meta.dtype) * division.share
        return int(total)


def ranks_of(dims: Iterable[Factor], cut: frozenset[Factor], ways: Ways) -> int:
    """Return over how many ranks a tensor is cut, all dims together."""
    return math.prod(most_ways(dim, cut, ways) for dim in dims)
