"""One comparison: the untouched model and the model under a plan, on the same inputs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor, nn

from autoshard.inputs import ExampleInputs
from autoshard.proving.analysis import Analysis
from autoshard.proving.diagnose import Sides, diagnose
from autoshard.proving.diagnose_size import failure
from autoshard.proving.observe import Tolerance
from autoshard.proving.proof import Culprit
from autoshard.proving.runs import Failed, Run, Weights, reference, shares
from autoshard.proving.subject import Cut, Subject

#: Sums over ranks run in another order than in one process: float64 keeps 1e-15 of each, and depth adds to that.
FLOAT64 = 1e-9
#: Gradients below this share of the largest one are measured against that share: one of a true zero (a bias that
#: softmax cancels) is rounding, about 1e-16 of the largest, and must stay far below the tolerance of its share.
ZERO = 1e-4


@dataclass
class Findings:
    """Errors by name, and what explains them."""

    outputs: dict[str, float] = field(default_factory=dict)
    parameters: dict[str, float] = field(default_factory=dict)
    culprits: tuple[Culprit, ...] = ()

    @property
    def right(self) -> bool:
        """Whether every number agrees."""
        return all(error <= FLOAT64 for error in (*self.outputs.values(), *self.parameters.values()))


def try_out(
    model: nn.Module, subject: Subject, cases: list[ExampleInputs], analysis: Analysis, say: Callable[[str], None]
) -> Findings:
    """Hold ``subject`` against ``model``, float64 on CPU, which is left as it is.

    Raises:
        AutoshardError: the plan cannot be applied, or the untouched model cannot be run.
    """
    say("run the untouched model")
    weights: list[Weights] = [{} for _ in cases]
    wants = reference(copy.deepcopy(model), cases, weights, subject.two_modes)
    say(f"run it on {subject.tp} simulated ranks")
    gots, cuts = shares(copy.deepcopy(model), subject, cases, weights)
    if isinstance(gots, Failed):
        say("find what explains it")
        return Findings(culprits=failure(gots, analysis.factored, cuts))
    findings = compare(wants, gots, cuts)
    if not findings.right:
        say("find what explains it")
        want, got = wants[0], gots[0]
        exact = Tolerance(FLOAT64, ZERO * _largest(want))
        sides = Sides(want.observed, got.observed, want.gradients, got.gradients, cuts, subject.tp, exact)
        findings.culprits = diagnose(model, analysis, sides)
    return findings


def compare(wants: list[Run], gots: list[Run], cuts: Mapping[str, Cut]) -> Findings:
    """Return the largest error of each output and each gradient over the cases."""
    found = Findings()
    for want, got in zip(wants, gots, strict=True):
        exact, within = Tolerance(FLOAT64, 1e-30), Tolerance(FLOAT64, ZERO * _largest(want))
        for path, value in want.outputs.items():
            errors = [exact.error(rank, value[0]) for rank in got.outputs.get(path, [])]
            found.outputs[path] = max(found.outputs.get(path, 0.0), *errors) if errors else float("inf")
        for fqn, gradient in want.gradients.items():
            error = _gradient_error(got.gradients.get(fqn), gradient, cuts.get(fqn, Cut()), within)
            found.parameters[fqn] = max(found.parameters.get(fqn, 0.0), error)
    return found


def _largest(run: Run) -> float:
    return max((float(g[0].abs().max()) for g in run.gradients.values() if g and g[0].numel()), default=1.0)


def _gradient_error(ranks: list[Tensor] | None, want: list[Tensor] | None, cut: Cut, within: Tolerance) -> float:
    if want is None:
        return 0.0 if ranks is None or all(not bool(r.any()) for r in ranks) else float("inf")
    whole = want[0]
    if ranks is None:
        return within.error(whole.new_zeros(whole.shape), whole)
    pairs = zip(ranks, cut.shares(whole, len(ranks)), strict=True)
    return max(within.error(rank, share) for rank, share in pairs)
