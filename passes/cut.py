"""Choose which factors to cut over the tp axis: the best set of cuts that do not meet in one tensor.

Reads the factors. Decides a set of *cuts*, each a set of leaves that must be cut together, by the parameter bytes they
divide. Leaves alone where values are converted: the next pass places that, and may send a cut back with its reason.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from autoshard.dtypes import dtype_bytes
from autoshard.ir import Op, Tensor
from autoshard.passes.factorise import Factored
from autoshard.passes.factors import Block, Factor, count, cut_parts, find, leaves, parts, whole_cut
from autoshard.plans import Refusal

_EXACT_SEARCH = 14
_IS_INPUT, _IS_CONSTANT = "an input of the model has it", "a constant tensor in the code has it"
#: Reasons that tell the user least come last: of a weight's two dims, the other one's is given if there is one.
_INFORMS = {_IS_INPUT: 3, "a norm needs it whole": 2, "a mean needs it whole": 2}


@dataclass(frozen=True)
class Cut:
    """Leaves that are cut together.

    Attributes:
        leaves: the factors.
        gathered: whether the activations are made whole again right behind the matmul that cut them.
        tensors: dim cut, by parameter name.
        touched: values that hold a cut dim while it is cut, as ``(value, index of result)``.
        saved_bytes: parameter bytes it divides, over all ranks.
    """

    leaves: frozenset[Factor]
    gathered: bool
    tensors: Mapping[str, int]
    touched: frozenset[tuple[str, int]]
    saved_bytes: int

    @property
    def key(self) -> str:
        """A name that is the same in every run: the parameters and dims it cuts."""
        return " ".join(f"{fqn}:{dim}" for fqn, dim in sorted(self.tensors.items()))


@dataclass(frozen=True)
class Chosen:
    """The cuts that are made, the ones that are not with their reasons, and what each parameter's dims ran into."""

    factored: Factored
    degree: int
    cuts: tuple[Cut, ...]
    refused: tuple[Refusal, ...]
    whys: Mapping[str, str]

    @property
    def inner(self) -> frozenset[Factor]:
        """Leaves that stay cut across ops."""
        return frozenset(leaf for cut in self.cuts if not cut.gathered for leaf in cut.leaves)

    @property
    def gathered(self) -> frozenset[Factor]:
        """Leaves that are made whole right behind the matmul that cut them."""
        return frozenset(leaf for cut in self.cuts if cut.gathered for leaf in cut.leaves)


@dataclass(frozen=True)
class ChooseCuts:
    """Find the best set of cuts over ``degree`` ranks.

    Attributes:
        degree: tp ranks.
        banned: reason by cut key, for cuts that a later pass refused.
        pinned: reason by parameter name, for parameters that must stay whole.
    """

    degree: int
    banned: Mapping[str, Refusal] = field(default_factory=dict)
    pinned: Mapping[str, str] = field(default_factory=dict)

    def run(self, factored: Factored) -> Chosen:
        """Return the chosen cuts."""
        index = _Index(factored)
        cuts: list[Cut] = []
        reasons: dict[str, tuple[int, Refusal]] = {}
        for leaf in index.candidates:
            made = self._cut(index, leaf)
            if isinstance(made, Cut) and made.key not in self.banned:
                if all(made.leaves != known.leaves for known in cuts):
                    cuts.append(made)
                continue
            reason = self.banned[made.key] if isinstance(made, Cut) else made
            weight = 0 if isinstance(made, Cut) else _INFORMS.get(reason.why, 1)
            for fqn, _ in index.parameters_of(leaf):
                if weight < reasons.get(fqn, (99, reason))[0]:
                    reasons[fqn] = (weight, reason)
        picked = _independent(cuts)
        done = {fqn for cut in picked for fqn in cut.tensors}
        left = {fqn: reason for fqn, (_, reason) in reasons.items() if fqn not in done}
        # a vector that stays whole costs nothing and has its reason in the plan's parameters
        matrices = [fqn for fqn in left if len(index.parameter[fqn].meta.shape) > 1]
        refused = dict.fromkeys(replace(left[fqn], fqn=fqn) for fqn in matrices)
        whys = {fqn: r.why + (f" ({r.where})" if r.where else "") for fqn, r in left.items()}
        return Chosen(factored, self.degree, picked, tuple(refused), whys)

    def _cut(self, index: _Index, leaf: Factor) -> Cut | Refusal:
        fqn = index.parameters_of(leaf)[0][0]
        for name, _ in index.parameters_of(leaf):
            if name in self.pinned:
                return Refusal(name, "", self.pinned[name])
        if leaf.size % self.degree:
            return Refusal(fqn, "", f"an extent of {leaf.size} does not divide by tp={self.degree}")
        blocks = [*leaf.blocks, *index.escapes(leaf)]
        if not blocks:
            return self._inner(index, leaf, fqn)
        made = self._gathered(index, leaf)
        return made if isinstance(made, Cut) else Refusal(fqn, blocks[0].where, blocks[0].why)

    def _inner(self, index: _Index, leaf: Factor, fqn: str) -> Cut | Refusal:
        closed = index.close(leaf, self.degree)
        if isinstance(closed, Block):
            return Refusal(fqn, closed.where, closed.why)
        tensors = index.tensors_of(closed)
        problem = index.twice(closed) or index.fused(closed, tensors, self.degree)
        if problem:
            return Refusal(problem.op or fqn, problem.where, problem.why)
        touched = frozenset(place for one in closed for place in index.places[one])
        return Cut(closed, False, tensors, touched, index.bytes_of(closed, tensors))

    def _gathered(self, index: _Index, leaf: Factor) -> Cut | None:
        """Return the cut that is undone behind each matmul making it; None where some use needs it cut for longer."""
        cut = frozenset([leaf])
        makers: set[tuple[str, int]] = set()
        tensors = index.tensors_of(cut)
        for fqn in tensors:
            value = index.parameter[fqn].value
            for op in index.users.get(value or "", ()):
                if not index.makes(op, leaf) and not index.looks_up(op, leaf):
                    return None
                if index.makes(op, leaf):
                    makers.add((op.name, 0))
        if not makers or index.twice(cut, makers) or index.fused(cut, tensors, self.degree):
            return None
        touched = frozenset(makers | {(index.parameter[fqn].value or "", 0) for fqn in tensors})
        return Cut(cut, True, tensors, touched, index.bytes_of(cut, tensors))


class _Index:
    """Where each leaf occurs, built once for a graph."""

    def __init__(self, factored: Factored) -> None:
        self.factored = factored
        traced = factored.traced
        self.parameter: dict[str, Tensor] = {p.fqn: p for p in traced.parameters}
        by_value = {p.value: p for p in traced.parameters if p.value}
        self.places: dict[Factor, list[tuple[str, int]]] = defaultdict(list)
        self.in_parameters: dict[Factor, list[tuple[str, int]]] = defaultdict(list)
        for value in factored.dims:
            for number, dims in enumerate(factored.tensors(value)):
                for leaf in dict.fromkeys(leaf for dim in dims for leaf in leaves(dim)):
                    self.places[leaf].append((value, number))
            if value in by_value:
                for i, dim in enumerate(factored.single(value)):
                    for leaf in dict.fromkeys(leaves(dim)):
                        self.in_parameters[leaf].append((by_value[value].fqn, i))
        self.candidates = sorted((leaf for leaf in self.in_parameters if leaf.size > 1), key=lambda f: f.serial)
        self.users: dict[str, list[Op]] = defaultdict(list)
        self.ops: dict[str, Op] = {}
        for op in traced.ops:
            self.ops[op.name] = op
            for name in dict.fromkeys(op.refs()):
                self.users[name].append(op)
        self.contracted: dict[Factor, list[tuple[str, Factor, str]]] = defaultdict(list)
        self.contracting: dict[str, list[tuple[Factor, str]]] = defaultdict(list)
        for item in factored.contractions:
            self.contracting[item.op].append((item.factor, item.kind))
            for leaf in dict.fromkeys(leaves(item.factor)):
                self.contracted[leaf].append((item.op, item.factor, item.kind))
        self._escapes: dict[Factor, list[Block]] = defaultdict(list)
        self._find_escapes()

    def _find_escapes(self) -> None:
        """Note leaves that an input, an output, a buffer or a constant of the model holds: those stay whole."""
        traced, single = self.factored.traced, self.factored.single
        whole = {"input": _IS_INPUT, "constant": _IS_CONSTANT}
        for source in traced.sources:
            if source.kind != "parameter":
                why = whole.get(source.kind, f"the buffer {source.fqn} has it, and buffers are not cut yet")
                self._note(single(source.name), Block(why, source.fqn))
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
        return self._escapes.get(leaf, [])

    def parameters_of(self, leaf: Factor) -> list[tuple[str, int]]:
        return self.in_parameters[leaf]

    def tensors_of(self, cut: frozenset[Factor]) -> dict[str, int]:
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
                    more = [f for f in leaves(piece) if self._free(f, degree)]
                    if not more:
                        why = "a part of what is summed over cannot be cut with it"
                        return Block(why, op, self.ops[op].where)
                    more.sort(key=lambda f: (f.size != leaf.size, f.serial))
                    cut.add(more[0])
                    pending.append(more[0])
        return frozenset(cut)

    def _free(self, leaf: Factor, degree: int) -> bool:
        return leaf.size % degree == 0 and leaf.size > 1 and not leaf.blocks and not self.escapes(leaf)

    def twice(self, cut: frozenset[Factor], only: Iterable[tuple[str, int]] | None = None) -> Block | None:
        """Return why a cut is impossible: it would cut one tensor twice, or sum over what the result keeps."""
        places = only if only is not None else dict.fromkeys(p for leaf in cut for p in self.places[leaf])
        for value, number in places:
            dims = self.factored.tensors(value)[number]
            if sum(count(dim, cut) for dim in dims) > 1:
                return Block("one tensor would be cut along two dims", "", self._where(value))
        for leaf in cut if only is None else ():
            for op, factor, _ in self.contracted.get(leaf, ()):
                if any(count(d, cut) for dims in self.factored.tensors(op) for d in dims):
                    return Block("an op would sum over it and keep it", "", self._where(op))
                if not whole_cut(factor, cut):
                    return Block("only some of what is summed over would be cut", "", self._where(op))
        return None

    def _where(self, value: str) -> str:
        return self.ops[value].where if value in self.ops else ""

    def fused(self, cut: frozenset[Factor], tensors: Mapping[str, int], degree: int) -> Block | None:
        """Return why a parameter's rows can't be cut in one run: it is a fused projection."""
        for fqn, dim in tensors.items():
            extent = self.factored.single(self.parameter[fqn].value or "")[dim]
            pieces = cut_parts(extent, cut, degree)
            if pieces != [(0, find(extent).size, True)]:
                op = next(iter(self.users.get(self.parameter[fqn].value or "", ())), None)
                number = "scattered" if pieces is None else str(len(pieces))
                why = f"a fused projection: dim {dim} is {number} parts that each need a cut of their own, not done yet"
                return Block(why, fqn, op.where if op else "")
        return None

    def makes(self, op: Op, leaf: Factor) -> bool:
        """Whether ``op`` is a matmul with a weight that puts ``leaf`` into its result, from activations without it."""
        cut = frozenset([leaf])
        if not any(kind == "matmul" for _, kind in self.contracting.get(op.name, ())):
            return False
        if any(count(factor, cut) for factor, _ in self.contracting[op.name]):
            return False
        from_weights = {p.value for p in self.factored.traced.parameters}
        activations = [n for n in op.refs() if n not in from_weights]
        if any(count(d, cut) for n in activations for d in self.factored.single(n)):
            return False
        return any(count(d, cut) for d in self.factored.single(op.name))

    def looks_up(self, op: Op, leaf: Factor) -> bool:
        """Whether ``op`` picks rows of a table whose rows are ``leaf``."""
        return any(
            kind == "lookup" and count(factor, frozenset([leaf])) for factor, kind in self.contracting.get(op.name, ())
        )

    def bytes_of(self, cut: frozenset[Factor], tensors: Mapping[str, int]) -> int:
        total = 0
        for fqn in tensors:
            meta = self.parameter[fqn].meta
            total += math.prod(meta.shape) * dtype_bytes(meta.dtype)
        return total


def _independent(cuts: list[Cut]) -> tuple[Cut, ...]:
    """Return the cuts with the most bytes of which no two meet in a tensor, component by component."""
    meets: dict[int, set[int]] = defaultdict(set)
    by_place: dict[tuple[str, int], list[int]] = defaultdict(list)
    for i, cut in enumerate(cuts):
        for place in cut.touched:
            by_place[place].append(i)
    for group in by_place.values():
        for i in group:
            meets[i].update(j for j in group if j != i)
    chosen: list[int] = []
    seen: set[int] = set()
    for i in range(len(cuts)):
        if i not in seen:
            component = _component(i, meets)
            seen.update(component)
            chosen += _best(sorted(component), cuts, meets)
    return tuple(cuts[i] for i in sorted(chosen))


def _component(start: int, meets: Mapping[int, set[int]]) -> set[int]:
    found: set[int] = set()
    pending = [start]
    while pending:
        i = pending.pop()
        if i not in found:
            found.add(i)
            pending += meets.get(i, ())
    return found


def _worth(cut: Cut) -> tuple[int, int]:
    """Order cuts: bytes saved, then the ones that need no gather."""
    return cut.saved_bytes, int(not cut.gathered)


def _best(component: list[int], cuts: list[Cut], meets: Mapping[int, set[int]]) -> list[int]:
    if len(component) > _EXACT_SEARCH:
        return _greedy(component, cuts, meets)
    best: tuple[tuple[int, int], list[int]] = ((-1, -1), [])
    for mask in range(1 << len(component)):
        picked = [i for bit, i in enumerate(component) if mask >> bit & 1]
        if any(j in meets.get(i, ()) for i in picked for j in picked):
            continue
        worth = (sum(_worth(cuts[i])[0] for i in picked), sum(_worth(cuts[i])[1] for i in picked))
        if worth > best[0]:
            best = (worth, picked)
    return best[1]


def _greedy(component: list[int], cuts: list[Cut], meets: Mapping[int, set[int]]) -> list[int]:
    picked: list[int] = []
    for i in sorted(component, key=lambda i: (_worth(cuts[i]), -i), reverse=True):
        if not any(j in meets.get(i, ()) for j in picked):
            picked.append(i)
    return picked
