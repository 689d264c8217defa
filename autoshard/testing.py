"""For users' own tests: a plan that stops being exact fails the build.

::

    from autoshard.testing import assert_plan_exact
    from my_package import make_model


    def test_the_plan_of_my_model_is_exact() -> None:
        assert_plan_exact(make_model(), tp=4)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from autoshard import api
from autoshard.plans import Plan
from autoshard.proving.proof import Proof
from autoshard.proving.surroundings import plain_surroundings
from autoshard.proving.verification import verify

__all__ = ["assert_plan_exact"]


def assert_plan_exact(
    model: nn.Module,
    plan: Plan | Mapping[str, Any] | str | Path | None = None,
    *,
    tp: int = 2,
    example_inputs: Any = None,
    tolerance: float | None = None,
) -> Proof:
    """Fail unless outputs and every gradient under a plan agree with the untouched model. Needs one process, no GPU.

    Args:
        model: any module, on any device, meta included; left as it is.
        plan: what ``autoshard.verify`` takes; made here for ``tp`` ranks where left out.
        tp: tensor-parallel degree of a plan that is made here or written by hand; a plan that says its own keeps that.
        example_inputs: as in ``autoshard.plan``; synthesised where left out.
        tolerance: relative error that counts as agreement; that of the proof where left out.

    Returns:
        The proof, for further questions.

    Raises:
        AssertionError: they differ; the message is the printed proof.
        AutoshardError: the model cannot be planned or run, or the plan does not fit it.
    """
    __tracebackhide__ = True  # pytest shows the line of the test
    own_degree = isinstance(plan, (Plan, str, Path)) or (isinstance(plan, Mapping) and "schema_version" in plan)
    made = api.plan(model, world=tp, tp=tp, example_inputs=example_inputs) if plan is None else plan
    degree = None if own_degree or plan is None else tp
    with plain_surroundings():
        proof = verify(model, made, tp=degree, example_inputs=example_inputs)
    if tolerance is not None:
        proof = _judged(proof, tolerance)
    if not proof.ok:
        raise AssertionError(str(proof))
    return proof


def _judged(proof: Proof, tolerance: float) -> Proof:
    """Return the proof under another tolerance; one that compared nothing stays as it is."""
    if not proof.parameters:
        return proof
    ok = all(error <= tolerance for error in (*proof.outputs.values(), *proof.parameters.values()))
    return replace(proof, ok=ok, tolerance=tolerance, culprits=() if ok else proof.culprits)
