"""What happens at the boundary of each module, and in its code, folded over repeated blocks."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict

from autoshard.folding import fold_strings
from autoshard.passes.states import Placed
from autoshard.passes.whys import Whys
from autoshard.patterns import unfold
from autoshard.plan_data import module_plan
from autoshard.plans import SEQUENCE, ModulePlan, Replacement, TensorPlan

_WHY_DRAWN = {
    "per_rank": "random numbers for each rank's share are the rank's own",
    "shared": "random numbers for whole values are the same on every rank",
}
_WHY_SEQUENCE = "in training it works on a rank's part of the sequence"
_WHY_RETURNED = "it returns a rank's share that nobody here takes"


def module_plans(
    placed: Placed,
    parameters: Mapping[str, TensorPlan],
    whys: Whys,
    draws: Mapping[str, str],
    returns: Mapping[str, Mapping[str, str]],
) -> dict[str, ModulePlan]:
    """Return the plan of each module with something to do, folded over the first number in its name."""
    inputs: dict[str, dict[str, str]] = defaultdict(dict)
    outputs: dict[str, dict[str, str]] = defaultdict(dict)
    shares: dict[str, dict[str, str]] = defaultdict(dict)
    order: dict[str, None] = {}
    for fqn, tensor in parameters.items():
        if tensor.tp_dim is not None or tensor.grad_sum:
            order[fqn.rpartition(".")[0]] = None
    for c in placed.conversions:
        order[c.fqn] = None
        if c.side == "inside":  # it is in the rewrites
            continue
        (inputs if c.side == "inputs" else outputs)[c.fqn][c.path] = c.kind
        if c.share:
            shares[c.fqn][c.path] = c.share
    settings: dict[str, dict[str, int]] = defaultdict(dict)
    for (fqn, name), value in placed.settings.items():
        order[fqn] = None
        settings[fqn][name] = value
    for fqn in (*placed.rewrites, *draws, *returns):
        order[fqn] = None
    sequence = _in_training(placed)
    for fqn in sequence:
        order[fqn] = None
    for c in placed.sequence.conversions:
        if c.share:
            shares[c.fqn].setdefault(c.path, c.share)
    homes: dict[str, dict[str, TensorPlan]] = defaultdict(dict)
    for fqn, tensor in parameters.items():
        homes[fqn.rpartition(".")[0]][fqn] = tensor
    first_call: dict[str, int] = {}
    for call in placed.chosen.factored.traced.calls:
        first_call.setdefault(call.fqn, call.id)
    plans: dict[str, ModulePlan] = {}
    for fqn in sorted(order, key=lambda f: first_call.get(f, len(first_call))):
        style, why = _style(placed, fqn, homes[fqn], inputs[fqn], outputs[fqn], whys)
        lookup = placed.lookups.get(fqn)
        rewrites = placed.rewrites.get(fqn, ())
        if style == "replicate" and (fqn in sequence or any(f in placed.sequence.parameters for f in homes[fqn])):
            style, why = SEQUENCE, _WHY_SEQUENCE
        if style == "replicate" and not why:
            style, why = "resize", "sizes in its code follow the cut"
            if not settings[fqn] and not rewrites:
                style, why = "region", _WHY_DRAWN.get(draws.get(fqn, ""), _WHY_RETURNED)
        plans[fqn] = ModulePlan(
            style,
            inputs[fqn],
            outputs[fqn],
            why,
            shares[fqn],
            lookup,
            settings[fqn],
            rewrites,
            draws.get(fqn),
            returns.get(fqn, {}),
            sequence.get(fqn, {}),
        )
    return _folded(plans)


def _in_training(placed: Placed) -> dict[str, dict[str, str]]:
    """Return what is converted otherwise while the sequence is cut, by module."""
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for c in placed.sequence.conversions:
        found[c.fqn][f"{c.side}:{c.path}"] = c.kind
    for fqn, more in placed.sequence.returns.items():
        found[fqn] |= more
    return found


def replaced(found: Iterable[Replacement], modules: Mapping[str, ModulePlan]) -> tuple[Replacement, ...]:
    """Return the replacements of modules in which something happens, folded: the others keep torch's own code."""
    busy = {
        ".".join(steps[:n])
        for p in modules
        for f in unfold(p)
        for steps in [f.split(".")]
        for n in range(len(steps) + 1)
    }
    folded = fold_strings({one.fqn: f"{one.kind}|{one.why}" for one in found if one.fqn in busy})
    return tuple(Replacement(fqn, *text.split("|", 1)) for fqn, text in folded.items())


def _style(
    placed: Placed,
    fqn: str,
    own: Mapping[str, TensorPlan],
    inputs: Mapping[str, str],
    outputs: Mapping[str, str],
    whys: Whys,
) -> tuple[str, str]:
    cut = next((t for t in own.values() if t.tp_dim is not None), None)
    if fqn in placed.lookups:
        return "embedding_rowwise", "rows are looked up where they live; the parts are summed"
    if cut is not None:
        if any(kind.startswith("S(") for kind in outputs.values()):
            gathered = any(kind.endswith("->R") for kind in outputs.values())
            return ("colwise_gather_output" if gathered else "colwise"), cut.why
        first = cut.tied_to or next(n for n, t in own.items() if t is cut)
        return ("rowwise" if first in whys.summed else "colwise"), cut.why
    if outputs or inputs:
        if any(kind.startswith("P->") for kind in outputs.values()):
            return "region", "what it returns is a partial sum"
        return "region", "work inside is divided; the gradient of what enters is summed"
    return "replicate", next((t.why for t in own.values() if t.grad_sum), "")


def _folded(plans: Mapping[str, ModulePlan]) -> dict[str, ModulePlan]:
    texts = {fqn: json.dumps(asdict(plan)) for fqn, plan in plans.items()}
    return {pattern: module_plan(json.loads(text)) for pattern, text in fold_strings(texts).items()}
