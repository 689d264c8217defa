"""An inferred plan beside a hand plan: same, better, worse or different.

* **same**: the same parameters are cut along the same dims, and no more bytes are moved.
* **better**: the same parameters with fewer bytes moved; or more parameters, with no more bytes moved per byte cut, or
  with no more moved for the hand plan's own cuts: a plan that is made again with all others whole shows it.
* **worse**: fewer parameters, or the same with more bytes moved.
* **different**: anything else.

What is compared is the dim of each parameter. Neither the pieces of a fused one nor gradient sums are: they follow
from the code, and verification shows whether they are right.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from autoshard.folding import fold_strings
from autoshard.ir import Traced
from autoshard.plans import Plan, TensorPlan
from zoo.moved import moved_bytes
from zoo.rows import Agreement
from zoo.weights import cut_share, tensor_bytes, traced_parameters

#: Names an explanation lists before it only counts them.
_LISTED = 4


def agreement(plan: Plan, hand: Plan, traced: Traced) -> Agreement:
    """Hold ``plan`` beside ``hand``, both for the model of ``traced`` at one tp."""
    ours = {fqn: t for fqn, t in plan.parameters.items() if t.tied_to is None}
    mine = {fqn: dim for fqn, t in ours.items() if (dim := _dim(t)) is not None}
    theirs = {fqn: hand.parameters[fqn].tp_dim for fqn in ours if hand.parameters[fqn].tp_dim is not None}
    used = traced_parameters(traced)
    cut = int(sum(tensor_bytes(ours[fqn]) * cut_share(ours[fqn]) for fqn in mine if fqn in used))
    hand_cut = sum(tensor_bytes(ours[fqn]) for fqn in theirs if fqn in used)
    moved, hand_moved = moved_bytes(plan, traced), moved_bytes(hand, traced)
    verdict, why = _judge(mine, theirs, moved, hand_moved, moved * hand_cut > hand_moved * cut)
    missed = [fqn for fqn in theirs if fqn not in mine]
    if verdict != "same":
        why = "; ".join(text for text in (why, _missed(missed, ours), _added(mine, theirs)) if text)
    return Agreement(verdict, why, cut, hand_cut, moved, hand_moved)


def covers(plan: Plan, hand: Plan) -> bool:
    """Return whether ``plan`` cuts every parameter that ``hand`` does, along whatever dim."""
    ours = {fqn: t for fqn, t in plan.parameters.items() if t.tied_to is None}
    return all(_dim(t) is not None for fqn, t in ours.items() if hand.parameters[fqn].tp_dim is not None)


def added(plan: Plan, hand: Plan) -> list[str]:
    """Return the parameters that only ``plan`` cuts, if it cuts all that ``hand`` does; else none."""
    ours = {fqn: t for fqn, t in plan.parameters.items() if t.tied_to is None}
    mine = {fqn for fqn, t in ours.items() if _dim(t) is not None}
    theirs = {fqn for fqn in ours if hand.parameters[fqn].tp_dim is not None}
    return [fqn for fqn in ours if fqn in mine - theirs] if mine > theirs else []


def _dim(tensor: TensorPlan) -> int | None:
    return tensor.tp_dim if tensor.tp_dim is not None else tensor.slice_dim


def _judge(
    mine: Mapping[str, int | None], theirs: Mapping[str, int | None], moved: int, hand_moved: int, dearer: bool
) -> tuple[str, str]:
    """Return the verdict, and what the numbers say for it; ``dearer``: whether a byte cut moves more bytes."""
    says = f"moves {moved} bytes where the hand plan moves {hand_moved}"
    if mine.keys() == theirs.keys():
        if moved != hand_moved:
            return ("better" if moved < hand_moved else "worse"), says
        turned = [fqn for fqn in mine if mine[fqn] != theirs[fqn]]
        return ("different", f"another dim of {_names(turned)}") if turned else ("same", "")
    if mine.keys() > theirs.keys():
        return ("different", f"{says}: more for each byte cut") if dearer else ("better", says)
    return ("worse" if mine.keys() < theirs.keys() else "different"), ""


def _missed(missed: Iterable[str], ours: Mapping[str, TensorPlan]) -> str:
    texts = fold_strings({fqn: ours[fqn].why for fqn in missed})
    by_reason: dict[str, list[str]] = {}
    for pattern, why in texts.items():
        by_reason.setdefault(why, []).append(pattern)
    return "; ".join(f"whole: {_listed(patterns)}: {why}" for why, patterns in by_reason.items())


def _added(mine: Iterable[str], theirs: Mapping[str, int | None]) -> str:
    added = [fqn for fqn in mine if fqn not in theirs]
    return f"cut here only: {_names(added)}" if added else ""


def _names(fqns: Iterable[str]) -> str:
    return _listed(list(fold_strings(dict.fromkeys(fqns, ""))))


def _listed(patterns: list[str]) -> str:
    more = len(patterns) - _LISTED
    return ", ".join(f"`{p}`" for p in patterns[:_LISTED]) + (f" and {more} more" if more > 0 else "")
