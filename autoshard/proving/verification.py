"""Prove a plan: the model under it against the untouched model, all tp ranks simulated in one process.

The same executor code runs as under torchrun. What is compared: every output, and the gradient of every parameter, in
float64, on two shapes, the second backward accumulated on the first. What this does not prove is said in the report:
FSDP, optimizers and dropout need processes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from autoshard.errors import InvalidArgument, PlanMismatch
from autoshard.hand.reader import from_hand, is_hand_plan
from autoshard.hand.subject import HandSubject
from autoshard.hand.tables import unsound_tables
from autoshard.plans import Plan
from autoshard.proving.analysis import Analysis
from autoshard.proving.cases import make_cases
from autoshard.proving.proof import Culprit, Proof
from autoshard.proving.specimen import fit, make_specimen
from autoshard.proving.subject import PlanSubject
from autoshard.proving.surroundings import plain_surroundings
from autoshard.proving.trial import FLOAT64, Findings, try_out
from autoshard.reading import read_plan

Say = Callable[[str], None]


def verify(
    model: nn.Module,
    plan: Plan | Mapping[str, Any] | str | Path,
    *,
    tp: int | None = None,
    example_inputs: Any = None,
    progress: Say | None = None,
) -> Proof:
    """Hold a plan against the untouched model, in one process.

    Args:
        model: the model the plan is for, on any device, meta included; left as it is.
        plan: a plan, its dict or a path to its file; or a plan written by hand, a dict of module patterns to style
            names (transformers' ``model.tp_plan``) or to torch's ``ParallelStyle`` objects.
        tp: number of tensor-parallel ranks for a plan written by hand, 2 where left out.
        example_inputs: as in ``autoshard.plan``; synthesised where left out.
        progress: called with what is being done.

    Returns:
        A report: ``ok``, ``parameters`` {fqn: error}, ``outputs`` {path: error}, ``culprits``; printing shows it.

    Raises:
        AutoshardError: the plan does not fit the model, or the model cannot be run.
    """
    say = progress or (lambda _: None)
    with plain_surroundings():
        if is_hand_plan(plan):
            return _verify_hand(model, plan, 2 if tp is None else tp, example_inputs, say)  # type: ignore[arg-type]
        return _verify_plan(model, read_plan(plan), tp, example_inputs, say)


def _verify_plan(model: nn.Module, made: Plan, tp: int | None, given: Any, say: Say) -> Proof:
    """Hold a plan of ours against the untouched model."""
    start = time.perf_counter()
    if tp is not None and tp != made.mesh.tp:
        raise InvalidArgument(
            f"the plan is for {made.mesh.tp} tensor-parallel ranks", got=f"tp={tp}; allowed: {made.mesh.tp}"
        )
    if made.mesh.tp == 1:
        return Proof(True, {}, {}, (), 1, ("the plan cuts nothing over tp: there is nothing to prove",), FLOAT64, 0.0)
    say("copy a specimen")
    analysis = Analysis(model, made.mesh.tp, given)
    specimen = make_specimen(model, made.mesh.tp, lambda: analysis.placed, given=given)
    cases = make_cases(specimen.model, given, made.mesh.tp if made.sequence else 1)
    findings = try_out(specimen.model, PlanSubject(fit(made, specimen)), cases, analysis, say)
    return _proof(findings, made.mesh.tp, specimen.shrunk, start)


def _verify_hand(model: nn.Module, plan: Mapping[str, Any], tp: int, given: Any, say: Say) -> Proof:
    """Hold a plan written by hand against the untouched model: a rule that cannot be followed is a finding."""
    start = time.perf_counter()
    if tp < 2:
        raise InvalidArgument("a hand plan is proved on two ranks or more", got=f"tp={tp}; allowed: 2 and up")
    say("copy a specimen")
    analysis = Analysis(model, tp, given)
    specimen = make_specimen(model, tp, lambda: analysis.placed, given=given)
    hand = from_hand(specimen.model, plan, tp)
    remarks = (*specimen.shrunk, *hand.notes)
    faults = hand.faults or tuple(unsound_tables(specimen.model, hand.plan))
    if faults:
        return _proof(Findings(culprits=faults), tp, remarks, start)
    cases = make_cases(specimen.model, given)
    try:
        findings = try_out(specimen.model, HandSubject(hand), cases, analysis, say)
    except PlanMismatch as error:
        findings = Findings(culprits=(Culprit("rule", error.at or "", error.what),))
    return _proof(findings, tp, remarks, start)


def _proof(findings: Findings, tp: int, remarks: tuple[str, ...], start: float) -> Proof:
    ok = bool(findings.parameters) and findings.right
    seconds = time.perf_counter() - start
    return Proof(ok, findings.parameters, findings.outputs, findings.culprits, tp, remarks, FLOAT64, seconds)
