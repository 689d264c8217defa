"""Choose which factors to cut over the tp axis: the best set of cuts that do not meet in one tensor.

Reads the factors. Decides a set of *cuts*, each a set of leaves that must be cut together, by the parameter bytes they
divide. Leaves alone where values are converted: the next pass places that, and may send a cut back with its reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from autoshard.passes.factorise import Factored
from autoshard.passes.factors import Block, Factor, Ways, leaves, local_size
from autoshard.passes.gathered import gathers
from autoshard.passes.occurrence import IS_INPUT, Division, Occurrences
from autoshard.passes.select import select
from autoshard.passes.worth import too_small
from autoshard.plans import Refusal

#: Reasons that tell the user least come last: of a weight's two dims, the other one's is given if there is one.
_INFORMS = {IS_INPUT: 3, "a norm needs it whole": 2}


@dataclass(frozen=True)
class Cut:
    """Leaves that are cut together.

    Attributes:
        leaves: the factors.
        ways: over how many ranks each leaf is cut; fewer than all where two leaves share the ranks.
        gathered: whether the activations are made whole again right behind the matmul that cut them.
        divisions: how each parameter is divided, by name.
        touched: values that hold a cut dim while it is cut, as ``(value, index of result)``.
        saved_bytes: parameter bytes it divides, over all ranks.
        averaged: whether a sum or mean of activations runs over it: chosen where nothing simpler is.
        dims: for a gathered one, the dim that is cut of each value.
        ends: for a gathered one, the values that are made whole.
    """

    leaves: frozenset[Factor]
    ways: Mapping[Factor, int]
    gathered: bool
    divisions: Mapping[str, Division]
    touched: frozenset[tuple[str, int]]
    saved_bytes: int
    averaged: bool = False
    dims: Mapping[str, int] = field(default_factory=dict)
    ends: frozenset[str] = frozenset()

    @cached_property
    def key(self) -> str:
        """A name that is the same in every run: the parameters, and the dims and parts of them it cuts."""
        texts = []
        for fqn, division in sorted(self.divisions.items()):
            spans = "" if division.even else "@" + ",".join(f"{o}+{n}/{ways}" for o, n, ways in division.pieces if ways)
            texts.append(f"{fqn}:{division.dim}{spans}")
        return ("gathered " if self.gathered else "") + " ".join(texts)

    def over(self, degree: int) -> Cut:
        """Return the same cut over another number of ranks that divides every leaf."""
        divisions = {fqn: division.over(degree) for fqn, division in self.divisions.items()}
        return replace(self, ways=dict.fromkeys(self.ways, degree), divisions=divisions)


@dataclass(frozen=True)
class Chosen:
    """The cuts that are made, the ones that are not with their reasons, and what each parameter's dims ran into.

    Attributes:
        index: where leaves occur in the graph.
        degree: tp ranks.
        cuts: the picked cuts.
        refused: matrices that stay whole, with the reason that tells most.
        whys: the same reason by name, vectors and what is gathered too.
        divisions: how each cut parameter is divided, by all cuts together.
    """

    index: Occurrences
    degree: int
    cuts: tuple[Cut, ...]
    refused: tuple[Refusal, ...]
    whys: Mapping[str, str]
    divisions: Mapping[str, Division] = field(default_factory=dict)

    @property
    def factored(self) -> Factored:
        """The factors."""
        return self.index.factored

    @cached_property
    def pattern(self) -> tuple[Any, ...]:
        """What placing reads of the cuts: the same for two degrees that cut the same."""
        return tuple((c.leaves, c.gathered, c.touched, tuple(c.dims.items()), c.ends) for c in self.cuts)

    @cached_property
    def inner(self) -> frozenset[Factor]:
        """Leaves that stay cut across ops."""
        return frozenset(leaf for cut in self.cuts if not cut.gathered for leaf in cut.leaves)

    @cached_property
    def ways(self) -> Ways:
        """Over how many ranks leaves are cut."""
        found = {leaf: ways for cut in self.cuts for leaf, ways in cut.ways.items()}
        return self.degree if set(found.values()) <= {self.degree} else found

    @cached_property
    def gathered(self) -> frozenset[Factor]:
        """Leaves of the rows of matrices that are cut for their own matmul only."""
        return frozenset(leaf for cut in self.cuts if cut.gathered for leaf in cut.leaves)

    @cached_property
    def _gathered_dims(self) -> dict[str, int]:
        return {value: dim for cut in self.cuts for value, dim in cut.dims.items()}

    def gathered_dim(self, value: str) -> int | None:
        """Return the dim along which a value is cut and made whole right behind its maker; None for another value."""
        return self._gathered_dims.get(value)

    @cached_property
    def ends(self) -> frozenset[str]:
        """Values that are made whole right behind their makers."""
        return frozenset(value for cut in self.cuts for value in cut.ends)

    def leaves_in(self, value: str) -> frozenset[Factor]:
        """Return the leaves that stay cut in a value."""
        return frozenset() if value in self._gathered_dims else self.inner

    def local_shape(self, value: str, number: int = 0) -> tuple[int, ...]:
        """Return the shape (elements) that a rank has of a value, as its maker leaves it."""
        dims = self.factored.tensors(value)[number]
        cut, whole = self.leaves_in(value), self.gathered_dim(value)
        sizes = [local_size(dim, cut, self.ways) for dim in dims]
        if whole is not None:
            sizes[whole] //= self.degree
        return tuple(sizes)


@dataclass(frozen=True)
class ChooseCuts:
    """Find the best set of cuts over ``degree`` ranks.

    Attributes:
        degree: tp ranks.
        banned: reason by cut key, for cuts that a later pass refused.
        pinned: reason by parameter name, for parameters that must stay whole.
        weigh: whether small cuts are left whole where they do not pay: not so where the user chose the degree.

    ``replace(choose, degree=..., banned=...)`` chooses over another degree; cuts that both divide are made once.
    """

    degree: int
    banned: Mapping[str, Refusal] = field(default_factory=dict)
    pinned: Mapping[str, str] = field(default_factory=dict)
    weigh: bool = False
    _even: dict[tuple[str, frozenset[Factor]], Cut | Refusal] = field(default_factory=dict, compare=False, repr=False)
    _gathered: list[tuple[int, Cut, str | None]] = field(default_factory=list, compare=False, repr=False)

    def run(self, index: Occurrences) -> Chosen:
        """Return the chosen cuts."""
        if self.degree == 1:
            return Chosen(index, 1, (), (), {})
        cuts: list[Cut] = []
        known: set[frozenset[Factor]] = set()
        reasons: dict[str, tuple[int, Refusal]] = {}
        for leaf in index.candidates:
            made = self._cut(index, leaf) if leaf.size % self.degree == 0 else self._shared(index, leaf)
            reason = self._sent_back(made) if isinstance(made, Cut) else made
            if isinstance(made, Cut) and reason is None:
                if made.leaves not in known:
                    known.add(made.leaves)
                    cuts.append(made)
            elif reason is not None:
                weight = 0 if isinstance(made, Cut) else _INFORMS.get(reason.why, 1)
                for fqn, _ in index.parameters_of(leaf):
                    if weight < reasons.get(fqn, (99, reason))[0]:
                        reasons[fqn] = (weight, reason)
        for made, why in self._all_gathered(index):
            reason = self._sent_back(made)
            if reason is None and why is None:
                cuts.append(made)
                continue
            for fqn in made.divisions:
                reasons.setdefault(fqn, (0, reason or Refusal(fqn, "", why or "")))
        numbers = dict.fromkeys(select(cuts, index, self.degree))
        picked = tuple(cuts[i] for i in numbers)
        order = {fqn: number for number, fqn in enumerate(dict.fromkeys(f for one in picked for f in one.divisions))}
        for cut in (cut for i, cut in enumerate(cuts) if not cut.gathered and i not in numbers):
            met = min(order.keys() & cut.divisions.keys(), key=order.__getitem__, default=None)
            twice = f"its extent stays whole, or {met} would be cut twice"
            why = twice if met else "other cuts of the same values save more"
            for fqn in cut.divisions:
                if fqn in index.parameter:
                    reasons.setdefault(fqn, (1, Refusal(fqn, "", why)))
        kept = {fqn for cut in picked if not cut.gathered for fqn in cut.divisions}
        left = {fqn: reason for fqn, (_, reason) in reasons.items() if fqn not in kept}
        gathered = {fqn for cut in picked if cut.gathered for fqn in cut.divisions}
        # a vector that stays whole costs nothing and has its reason in the plan's parameters
        matrices = [fqn for fqn in left if len(index.parameter[fqn].meta.shape) > 1 and fqn not in gathered]
        refused = dict.fromkeys(replace(left[fqn], fqn=fqn) for fqn in matrices)
        whys = {fqn: r.why + (f" ({r.where})" if r.where else "") for fqn, r in left.items()}
        chosen = Chosen(index, self.degree, picked, tuple(refused), whys)
        return replace(chosen, divisions=self._divisions(chosen))

    def _divisions(self, chosen: Chosen) -> dict[str, Division]:
        """Return how each cut parameter is divided by all cuts together."""
        found = {fqn: division for cut in chosen.cuts if cut.gathered for fqn, division in cut.divisions.items()}
        for fqn in dict.fromkeys(fqn for cut in chosen.cuts if not cut.gathered for fqn in cut.divisions):
            division = chosen.index.division(fqn, chosen.inner, chosen.ways, self.degree)
            assert division is not None, "checked when the cut was made"
            found[fqn] = division
        return found

    def _sent_back(self, cut: Cut) -> Refusal | None:
        """Return why a later pass refused a cut; None where none did."""
        return self.banned.get(cut.key) if self.banned else None

    def _pinned(self, names: Mapping[str, object]) -> Refusal | None:
        return next((Refusal(n, "", self.pinned[n]) for n in names if n in self.pinned), None)

    def _cut(self, index: Occurrences, leaf: Factor) -> Cut | Refusal:
        """Return the cut of a leaf whose values stay cut from op to op."""
        fqn = index.parameters_of(leaf)[0][0]
        for reason in [*leaf.blocks, *index.escapes(leaf)]:
            return Refusal(fqn, reason.where, reason.why)
        closed = index.close(leaf, self.degree)
        if isinstance(closed, Block):
            return Refusal(fqn, closed.where, closed.why)
        if (fqn, closed) not in self._even:
            self._even[fqn, closed] = self._of(index, fqn, dict.fromkeys(closed, self.degree))
        made = self._even[fqn, closed]
        return made.over(self.degree) if isinstance(made, Cut) else made

    def _shared(self, index: Occurrences, leaf: Factor) -> Cut | Refusal:
        """Return the cut of a leaf of too few indices together with the one below it: kv heads and their group."""
        fqn = index.parameters_of(leaf)[0][0]
        below = index.below(leaf)
        rest = self.degree // leaf.size
        if self.degree % leaf.size or below is None or below.size % rest or below.blocks or index.escapes(below):
            return Refusal(fqn, "", f"an extent of {leaf.size} does not divide by tp={self.degree}")
        for reason in [*leaf.blocks, *index.escapes(leaf)]:
            return Refusal(fqn, reason.where, reason.why)
        return self._of(index, fqn, {leaf: leaf.size, below: rest})

    def _of(self, index: Occurrences, fqn: str, ways: Mapping[Factor, int]) -> Cut | Refusal:
        closed = frozenset(ways)
        tensors = index.tensors_of(closed)
        pinned = self._pinned(tensors)
        if pinned:
            return pinned
        problem = index.twice(closed, ways, self.degree)
        if problem:
            return Refusal(problem.op or fqn, problem.where, problem.why)
        divisions: dict[str, Division] = {}
        for name, dim in tensors.items():
            division = index.division(name, closed, ways, self.degree)
            if division is None:
                user = next(iter(index.users.get(index.parameter[name].value or "", ())), None)
                return Refusal(name, user.where if user else "", f"dim {dim} would be cut in scattered places")
            divisions[name] = division
        for name in index.buffers_of(closed):
            division = index.division(name, closed, ways, self.degree)
            if division is None or not division.even:
                return Refusal(fqn, name, f"the buffer {name} would be cut in several places")
            divisions[name] = division
        touched = frozenset(place for one in closed for place in index.places[one])
        averaged = any(kind in ("sum", "mean") for one in closed for _, _, kind in index.contracted.get(one, ()))
        made = Cut(closed, ways, False, divisions, touched, index.bytes_of(divisions), averaged)
        why = self._small(index, made)
        return made if why is None else Refusal(fqn, "", why)

    def _small(self, index: Occurrences, cut: Cut) -> str | None:
        if not self.weigh:
            return None
        return too_small(
            index, frozenset() if cut.gathered else cut.leaves, (value for value, _ in cut.touched), cut.saved_bytes
        )

    def _all_gathered(self, index: Occurrences) -> Iterator[tuple[Cut, str | None]]:
        """Yield the cuts of matrices for their own matmul only, with why one does not pay."""
        if not self._gathered:
            self._gathered.extend(self._every_gathered(index))
        for rows, cut, why in self._gathered:
            if rows % self.degree == 0:
                yield cut.over(self.degree), why

    def _every_gathered(self, index: Occurrences) -> Iterator[tuple[int, Cut, str | None]]:
        for one in gathers(index, self.degree):
            if self._pinned(one.divisions):
                continue
            rows = (index.factored.single(value)[dim] for value, dim in one.dims.items())
            held = frozenset(leaf for dim in rows for leaf in leaves(dim))
            touched = frozenset((value, 0) for value in one.dims)
            saved = index.bytes_of(one.divisions)
            cut = Cut(held, {}, True, one.divisions, touched, saved, dims=one.dims, ends=one.ends)
            yield one.rows, cut, self._small(index, cut)
