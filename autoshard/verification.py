"""Prove a plan: the model under it against the untouched model, all tp ranks simulated in one process.

The same executor code runs as under torchrun. What is compared: every output, and the gradient of every parameter, in
float64, on two shapes, the second backward accumulated on the first. What this does not prove is said in the report:
FSDP, optimizers and dropout need processes.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from autoshard.diagnose import Sides, diagnose, failure
from autoshard.errors import AutoshardError
from autoshard.execute import apply, make_mesh
from autoshard.inputs import ExampleInputs, example_inputs, materialise
from autoshard.observe import Observed, Tolerance, observe
from autoshard.outputs import tensors
from autoshard.pipeline import Options, Stages, run
from autoshard.plans import Plan
from autoshard.proof import Culprit, Proof
from autoshard.reading import read_plan
from autoshard.simulate import on_each_rank, simulated
from autoshard.specimen import Specimen, make_specimen

#: Sums over ranks run in another order than in one process: float64 keeps 1e-15 of each, and depth adds to that.
FLOAT64 = 1e-9
#: Where the model's own code casts down on the way, a last bit of that dtype may flip.
CASTS = {"float32": 1e-5, "bfloat16": 5e-2, "float16": 1e-2}
#: Gradients below this share of the largest one are rounding of a true zero (a bias that softmax cancels).
ZERO = 1e-6

#: By output path, what the objective multiplies it with.
Weights = dict[str, Tensor]


def verify(
    model: nn.Module,
    plan: Plan | Mapping[str, Any] | str | Path,
    *,
    example_inputs: Any = None,
    progress: Callable[[str], None] | None = None,
) -> Proof:
    """Hold a plan against the untouched model, in one process.

    Args:
        model: the model the plan is for, on any device, meta included; left as it is.
        plan: a plan, its dict or a path to its file.
        example_inputs: as in ``autoshard.plan``; synthesised where left out.
        progress: called with what is being done.

    Returns:
        A report: ``ok``, ``parameters`` {fqn: error}, ``outputs`` {path: error}, ``culprits``; printing shows it.

    Raises:
        AutoshardError: the plan does not fit the model, or the model cannot be run.
    """
    say = progress or (lambda _: None)
    start = time.perf_counter()
    made = read_plan(plan)
    if made.mesh.tp == 1:
        return Proof(True, {}, {}, (), 1, ("the plan cuts nothing over tp: there is nothing to prove",), FLOAT64, 0.0)
    say("trace the model")
    _, stages = run(model, Options(made.mesh.tp, tp=made.mesh.tp, example_inputs=example_inputs, check_heads=False))
    say("copy a specimen")
    specimen = make_specimen(model, made, stages.placed)
    trial = _Trial(specimen, stages, example_inputs)
    return trial.run(say, start)


@dataclass(frozen=True)
class _Trial:
    """One comparison."""

    specimen: Specimen
    stages: Stages
    given: Any

    def run(self, say: Callable[[str], None], start: float) -> Proof:
        cases = self._cases()
        world, limit = self.specimen.plan.mesh.tp, self._limit()
        say("run the untouched model")
        weights: list[Weights] = [{} for _ in cases]
        wants = _reference(copy.deepcopy(self.specimen.model), cases, weights)
        say(f"run it on {world} simulated ranks")
        try:
            gots = _shares(copy.deepcopy(self.specimen.model), self.specimen.plan, cases, weights)
        except AutoshardError:
            raise
        except Exception as error:  # noqa: BLE001 - the user's own code fails on a share: that is the finding
            return self._proof({}, {}, (failure(error),), limit, start)
        outputs, parameters = self._compare(wants, gots, limit)
        if all(e <= FLOAT64 for e in (*outputs.values(), *parameters.values())):
            limit = FLOAT64  # no last bit flipped in what the model casts down
        culprits: tuple[Culprit, ...] = ()
        if any(not e <= limit for e in (*outputs.values(), *parameters.values())):
            say("find what explains it")
            floor = ZERO * _largest(wants[0])
            want, got = wants[0], gots[0]
            exact = Tolerance(limit, floor)
            sides = Sides(want.observed, got.observed, want.gradients, got.gradients, exact)
            culprits = diagnose(self.specimen, self.stages, sides)
        return self._proof(outputs, parameters, culprits, limit, start)

    def _cases(self) -> list[ExampleInputs]:
        """Return two inputs of different batch and length."""
        if self.given is not None and not self.specimen.shrunk:
            first = example_inputs(self.specimen.model, self.given)
            return [_floats(first), _floats(_smaller(first))]
        return [
            _floats(materialise(example_inputs(self.specimen.model, batch=batch, sequence=sequence), batch))
            for batch, sequence in ((2, 13), (3, 8))
        ]

    def _limit(self) -> float:
        """Return the tolerance: float64's, or that of the lowest dtype the model's code casts down to."""
        lowest = FLOAT64
        for op in self.stages.traced.ops:
            dtype = str(op.arguments.get("dtype", "")).removeprefix("torch.")
            if op.target in ("aten.to", "aten._to_copy", "aten.softmax") and dtype in CASTS and not op.no_grad:
                lowest = max(lowest, CASTS[dtype])
        return lowest

    def _compare(self, wants: list[Run], gots: list[Run], limit: float) -> tuple[dict[str, float], dict[str, float]]:
        """Return the largest error of each output and each gradient over the cases."""
        outputs: dict[str, float] = {}
        parameters: dict[str, float] = {}
        plans = self.specimen.plan.parameters
        for want, got in zip(wants, gots, strict=True):
            exact, within = Tolerance(limit, 1e-30), Tolerance(limit, ZERO * _largest(want))
            for path, value in want.outputs.items():
                errors = [exact.error(rank, value[0]) for rank in got.outputs.get(path, [])]
                outputs[path] = max(outputs.get(path, 0.0), *errors) if errors else float("inf")
            for fqn, gradient in want.gradients.items():
                error = _gradient_error(got.gradients.get(fqn), gradient, plans[fqn].tp_dim, within)
                parameters[fqn] = max(parameters.get(fqn, 0.0), error)
        return outputs, parameters

    def _proof(
        self,
        outputs: dict[str, float],
        parameters: dict[str, float],
        culprits: tuple[Culprit, ...],
        limit: float,
        start: float,
    ) -> Proof:
        ok = bool(parameters) and all(e <= limit for e in (*outputs.values(), *parameters.values()))
        seconds = time.perf_counter() - start
        return Proof(
            ok, parameters, outputs, culprits, self.specimen.plan.mesh.tp, self.specimen.shrunk, limit, seconds
        )


def _largest(run: Run) -> float:
    return max((float(g[0].abs().max()) for g in run.gradients.values() if g), default=1.0)


def _gradient_error(ranks: list[Tensor] | None, want: list[Tensor] | None, dim: int | None, within: Tolerance) -> float:
    if want is None:
        return 0.0 if ranks is None or all(not bool(r.any()) for r in ranks) else float("inf")
    whole = want[0]
    if ranks is None:
        return within.error(torch.zeros_like(whole), whole)
    shares = [whole] * len(ranks) if dim is None else list(whole.chunk(len(ranks), dim))
    return max(within.error(rank, share) for rank, share in zip(ranks, shares, strict=True))


@dataclass(frozen=True)
class Run:
    """What one run gave: outputs and gradients by name, each on every rank, and what was observed on the way."""

    outputs: dict[str, list[Tensor]]
    gradients: dict[str, list[Tensor] | None]
    observed: Observed


def _reference(model: nn.Module, cases: list[ExampleInputs], weightings: list[Weights]) -> list[Run]:
    return _run(model, cases, weightings, lambda tensor: [tensor.detach()])


def _shares(model: nn.Module, plan: Plan, cases: list[ExampleInputs], weightings: list[Weights]) -> list[Run]:
    world = plan.mesh.tp
    with simulated(world):
        apply(model, plan, make_mesh(plan, "cpu"))
        return _run(model, cases, weightings, lambda tensor: on_each_rank(tensor, world))


def _run(
    model: nn.Module, cases: list[ExampleInputs], weightings: list[Weights], read: Callable[[Tensor], list[Tensor]]
) -> list[Run]:
    """Run forward and backward on each case, gradients accumulated, and return what there was after each."""
    runs: list[Run] = []
    for case, weights in zip(cases, weightings, strict=True):
        with observe(model, read) as observed:
            answer = model(*case.args, **case.kwargs)
            found = {path: tensor for path, tensor in tensors(answer) if tensor.is_floating_point()}
            _objective(found, weights).backward()
        outputs = {path: [t.clone() for t in read(tensor)] for path, tensor in found.items()}
        gradients = {
            fqn: None if p.grad is None else [t.clone() for t in read(p.grad)]
            for fqn, p in model.named_parameters(remove_duplicate=False)
        }
        runs.append(Run(outputs, gradients, observed))
    return runs


def _objective(found: dict[str, Tensor], weights: Weights) -> Tensor:
    """Return one number that every element of every output moves, each by its own weight.

    The untouched model's run draws the weights: inside the simulation each rank would draw its own.
    """
    parts = []
    for path, tensor in sorted(found.items()):
        if tensor.requires_grad:
            if path not in weights:
                generator = torch.Generator().manual_seed(len(weights))
                weights[path] = torch.randn(tensor.shape, dtype=torch.float64, generator=generator)
            parts.append((tensor * weights[path]).sum())
    return torch.stack(parts).sum()


def _floats(case: ExampleInputs) -> ExampleInputs:
    """Return the inputs with real float64 values on CPU."""

    def convert(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            leaf = leaf.detach().cpu()
            return leaf.double() if leaf.is_floating_point() else leaf
        return leaf

    args, kwargs = torch.utils._pytree.tree_map(convert, (case.args, case.kwargs))
    return ExampleInputs(args, kwargs, case.dims, case.assumptions, case.tried, case.bounds)


def _smaller(case: ExampleInputs) -> ExampleInputs:
    """Return given inputs with one sequence less, where there are several."""

    def cut(path: str, value: Any) -> Any:
        dims = case.dims.get(path)
        if isinstance(value, Tensor) and dims and "batch" in dims and value.shape[dims.index("batch")] > 1:
            return value.narrow(dims.index("batch"), 0, value.shape[dims.index("batch")] - 1)
        return value

    args = tuple(cut(str(index), value) for index, value in enumerate(case.args))
    kwargs = {name: cut(name, value) for name, value in case.kwargs.items()}
    return ExampleInputs(args, kwargs, case.dims, case.assumptions, case.tried, case.bounds)
