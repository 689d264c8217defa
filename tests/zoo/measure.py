"""Plan, verify and judge one tiny type: the row of the sweep."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

import autoshard
from autoshard.folding import fold_strings
from autoshard.hand.reader import from_hand
from autoshard.patterns import unfold
from autoshard.pipeline import Options, Stages, run
from autoshard.plans import Plan
from zoo.agreement import added, agreement, covers
from zoo.rows import Agreement, Left, Row
from zoo.tiny import tiny
from zoo.weights import cut_share, matmul_weights, tensor_bytes, traced_parameters

TP = 2


def measured(model_type: str, verify: bool = True, hand: bool = True) -> Row:
    """Return the row of a type at tp=2, each measure as far as the type comes.

    ``hand`` says whether the model's own plan is one to be held beside ours.
    """
    try:
        model, inputs = tiny(model_type)
        with torch.no_grad():
            model(**inputs)
    except Exception as error:  # noqa: BLE001 - whatever a type's own code raises is the finding
        return Row(model_type, "not run", error=_line(error))
    start = time.perf_counter()
    try:
        plan, stages = planned(model, inputs)
    except Exception as error:  # noqa: BLE001 - a planner that raises anything at all is the finding
        return Row(model_type, "no plan", error=_line(error), seconds=_since(start))
    rules = model.tp_plan if hand else None
    return replace(judged(model_type, model, inputs, plan, stages, rules, verify), seconds=_since(start))


def planned(model: nn.Module, inputs: Any, whole: Iterable[str] = ()) -> tuple[Plan, Stages]:
    """Return the plan at tp=2, also where no attention can be cut, and the stages on the way to it."""
    overrides = dict.fromkeys(whole, "replicate")
    return run(model, Options(world=TP, tp=TP, example_inputs=inputs, check_heads=False, overrides=overrides))


def _agreement(model: nn.Module, inputs: Any, plan: Plan, stages: Stages, rules: Any) -> Agreement:
    """Hold a plan beside the rules; one that cuts more and moves more is made again without what it cuts more."""
    hand = from_hand(model, rules, TP).plan
    first = agreement(plan, hand, stages.traced)
    more = added(plan, hand) if first.verdict == "different" else []
    if not more:
        return first
    again, stages = planned(model, inputs, more)
    second = agreement(again, hand, stages.traced)
    no_dearer = covers(again, hand) and second.moved_bytes <= second.hand_moved_bytes  # along whatever dims
    if second.verdict not in ("same", "better") and not no_dearer:
        return first
    says = f"with these whole too it moves {second.moved_bytes} bytes, the hand plan {second.hand_moved_bytes}"
    return replace(first, verdict="better", why=f"{first.why.partition('; ')[2]}; {says}")


def judged(
    name: str, model: nn.Module, inputs: Any, plan: Plan, stages: Stages, hand: Any = None, verify: bool = True
) -> Row:
    """Return the row of a plan, held beside the rules of ``hand`` if there are any."""
    row = Row(name, "planned", **_shares(plan, stages))
    if hand is not None:
        row = replace(row, agreement=_agreement(model, inputs, plan, stages, hand))
    return replace(row, **_proved(model, plan, inputs)) if verify else row


def _since(start: float) -> float:
    return round(time.perf_counter() - start, 1)


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".replace("\n", " ")[:400]


def _shares(plan: Plan, stages: Stages) -> dict[str, Any]:
    own = {fqn: tensor_bytes(t) for fqn, t in plan.parameters.items() if t.tied_to is None}
    used = traced_parameters(stages.traced)
    weights = matmul_weights(stages.factored)
    total = max(1, sum(own.values()))
    whole = [(pattern, share, why, unfold(pattern)) for pattern, share, why in plan.coverage.left]
    return {
        "traced": sum(own[fqn] for fqn in used & own.keys()) / total,
        "parameters": plan.coverage.parameter_bytes,
        "matmuls": sum(own[fqn] * cut_share(plan.parameters[fqn]) for fqn in weights)
        / max(1, sum(own[fqn] for fqn in weights)),
        "unknown": tuple(sorted(Counter(op for op, _ in stages.factored.unknown).items())),
        "left": tuple(Left(p, share, why) for p, share, why, names in whole if weights.intersection(names)),
        "opaque": tuple(
            f"{part.fqn or 'the model itself'}: {part.why} ({part.where})" for part in stages.traced.untraced
        ),
        "untraced": tuple(
            Left(pattern, sum(own[fqn] for fqn in unfold(pattern)) / total, why)
            for pattern, why in fold_strings({f: plan.parameters[f].why for f in own if f not in used}).items()
        ),
    }


def _proved(model: nn.Module, plan: Plan, inputs: Any) -> dict[str, Any]:
    try:
        proof = autoshard.verify(model, plan, example_inputs=inputs)
    except Exception as error:  # noqa: BLE001 - a proof that raises anything at all is the finding
        return {"verified": "failed", "proof": _line(error)}
    if proof.ok:
        return {"verified": "exact"}
    said = [f"{c.kind} {c.fqn}: {c.why}" for c in proof.culprits]
    errors = {**proof.above(proof.outputs), **proof.wrong}
    said += [f"{name} off by {error:.1e}" for name, error in errors.items()]
    return {"verified": "wrong", "proof": "; ".join(said[:3]).replace("\n", " ")[:400]}
