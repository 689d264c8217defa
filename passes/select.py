"""Pick the best set of cuts of which no two meet: the most parameter bytes, component by component.

Cuts whose activations stay cut come first, those that a sum or mean of activations runs over behind the others; one
that is gathered right behind its matmul takes what they leave.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Protocol

from autoshard.passes.factors import Factor
from autoshard.passes.occurrence import Occurrences, ranks_of

_EXACT_SEARCH = 14


class Candidate(Protocol):
    """What the selection reads of a cut."""

    @property
    def leaves(self) -> frozenset[Factor]: ...  # noqa: D102
    @property
    def ways(self) -> Mapping[Factor, int]: ...  # noqa: D102
    @property
    def gathered(self) -> bool: ...  # noqa: D102
    @property
    def touched(self) -> frozenset[tuple[str, int]]: ...  # noqa: D102
    @property
    def averaged(self) -> bool: ...  # noqa: D102
    @property
    def saved_bytes(self) -> int: ...  # noqa: D102


def select(cuts: Sequence[Candidate], index: Occurrences, degree: int) -> list[int]:
    """Return the positions of the picked cuts, in order."""
    meets = _meets(cuts, index, degree)
    chosen: list[int] = []
    seen: set[int] = set()
    for averaged in (False, True):
        free = {i for i, cut in enumerate(cuts) if not cut.gathered and cut.averaged == averaged}
        free -= {j for i in chosen for j in meets[i]}
        among = {i: meets[i] & free for i in free}
        for i in sorted(free):
            if i not in seen:
                component = _component(i, among)
                seen.update(component)
                chosen += _best(sorted(component), cuts, among)
    gathered = [i for i, cut in enumerate(cuts) if cut.gathered]
    met = {j for i in chosen for j in meets[i]}
    for i in sorted(gathered, key=lambda i: (-cuts[i].saved_bytes, i)):
        if i not in met:
            chosen.append(i)
            met |= meets[i]
    return sorted(chosen)


def _meets(cuts: Sequence[Candidate], index: Occurrences, degree: int) -> dict[int, set[int]]:
    """Return which cuts would cut one tensor twice: the parts of one concatenation do not."""
    meets: dict[int, set[int]] = defaultdict(set)
    by_place: dict[tuple[str, int], list[int]] = defaultdict(list)
    for i, cut in enumerate(cuts):
        for place in cut.touched:
            by_place[place].append(i)
    for (value, number), group in by_place.items():
        if len(group) < 2:
            continue
        dims = index.factored.tensors(value)[number]
        for i in group:
            for j in group:
                if i < j and j not in meets[i] and _together(cuts[i], cuts[j], dims, degree):
                    meets[i].add(j)
                    meets[j].add(i)
    return meets


def _together(a: Candidate, b: Candidate, dims: Sequence[Factor], degree: int) -> bool:
    if a.gathered or b.gathered or a.leaves & b.leaves:
        return True
    return ranks_of(dims, a.leaves | b.leaves, {**a.ways, **b.ways}) > degree


def _component(start: int, meets: Mapping[int, set[int]]) -> set[int]:
    found: set[int] = set()
    pending = [start]
    while pending:
        i = pending.pop()
        if i not in found:
            found.add(i)
            pending += meets.get(i, ())
    return found


def _best(component: list[int], cuts: Sequence[Candidate], meets: Mapping[int, set[int]]) -> list[int]:
    if len(component) > _EXACT_SEARCH:
        return _greedy(component, cuts, meets)
    best: tuple[int, list[int]] = (-1, [])
    for mask in range(1 << len(component)):
        picked = [i for bit, i in enumerate(component) if mask >> bit & 1]
        if any(j in meets.get(i, ()) for i in picked for j in picked):
            continue
        worth = sum(cuts[i].saved_bytes for i in picked)
        if worth > best[0]:
            best = (worth, picked)
    return best[1]


def _greedy(component: list[int], cuts: Sequence[Candidate], meets: Mapping[int, set[int]]) -> list[int]:
    picked: list[int] = []
    for i in sorted(component, key=lambda i: (cuts[i].saved_bytes, -i), reverse=True):
        if not any(j in meets.get(i, ()) for j in picked):
            picked.append(i)
    return picked
