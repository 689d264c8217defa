"""Prove a plan on local processes: TP and FSDP together, with one optimizer step, against the untouched model.

Each process is a rank of a gloo group and holds its share, as under torchrun. Every data-parallel rank has a batch of
its own; the objective is the mean over them, which is what FSDP makes of gradients.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from autoshard.errors import MeshMismatch
from autoshard.exported import user_place
from autoshard.inputs import materialise
from autoshard.plans import Mesh, Plan, TensorPlan
from autoshard.proving.analysis import Analysis
from autoshard.proving.cases import make_cases
from autoshard.proving.observe import Tolerance
from autoshard.proving.parcel import pack
from autoshard.proving.proof import Culprit, Proof
from autoshard.proving.ranks import Crashed, run_on_ranks
from autoshard.proving.specimen import fit, make_specimen
from autoshard.proving.step import LEARNING_RATE, Cases, Job, Outcome, on_rank, reference
from autoshard.proving.surroundings import plain_surroundings
from autoshard.proving.trial import FLOAT64, ZERO
from autoshard.reading import read_plan

LIMIT_SECONDS = 600.0


def verify_in_processes(
    model: nn.Module,
    plan: Plan | Mapping[str, Any] | str | Path,
    processes: int,
    *,
    target: str | None = None,
    example_inputs: Any = None,
    limit_seconds: float = LIMIT_SECONDS,
    progress: Callable[[str], None] | None = None,
) -> Proof:
    """Hold a plan against the untouched model on ``processes`` local ranks, one optimizer step included.

    Args:
        model: the model the plan is for, on any device, meta included; left as it is.
        plan: a plan, its dict or a path to its file. Where it is for another number of ranks, its tp is used and the
            rest is dp_shard.
        processes: number of ranks, a multiple of the plan's tp.
        target: what names the model on the command line: for models that cannot be pickled.
        example_inputs: as in ``autoshard.plan``; synthesised where left out. Each data-parallel rank gets the same.
        limit_seconds: for the processes.
        progress: called with what is being done.

    Raises:
        MeshMismatch: ``processes`` is no multiple of tp.
        InvalidArgument: the model cannot be sent to other processes.
        ProcessFailed: a process died, or did not answer in time.
        AutoshardError: the plan does not fit the model, or the model cannot be run.
    """
    with plain_surroundings():
        return _verify(model, read_plan(plan), processes, target, example_inputs, limit_seconds, progress)


def _verify(
    model: nn.Module,
    made: Plan,
    processes: int,
    target: str | None,
    given: Any,
    limit_seconds: float,
    progress: Callable[[str], None] | None,
) -> Proof:
    say = progress or (lambda _: None)
    start = time.perf_counter()
    mesh = _mesh(made.mesh, processes)
    say("copy a specimen")
    analysis = Analysis(model, mesh.tp, given)
    specimen = make_specimen(model, mesh.tp, lambda: analysis.placed, given=given)
    cases = _cases(specimen.model, given, mesh.data, mesh.tp if made.sequence else 1)
    parcel = pack(specimen.model, specimen.smaller, target)
    say("run the untouched model")
    wants = reference(specimen.model, cases)
    say(f"run it on {mesh.world} processes")
    job = Job(parcel, _on_mesh(made, fit(made, specimen), mesh), cases)
    answer = run_on_ranks(mesh.world, on_rank, pickle.dumps(job), limit_seconds)
    found = _crash(answer) if isinstance(answer, Crashed) else _compare(wants, answer, mesh)
    return replace(
        found, tp=mesh.tp, mesh=mesh, shrunk=specimen.shrunk, tolerance=FLOAT64, seconds=time.perf_counter() - start
    )


def _mesh(planned: Mesh, processes: int) -> Mesh:
    if planned.world == processes:
        return planned
    if processes % planned.tp:
        raise MeshMismatch(
            f"{processes} processes are no multiple of the plan's {planned.tp} tensor-parallel ranks",
            got=f"{processes}; allowed: {planned.tp}, {2 * planned.tp}, {3 * planned.tp}, ...",
        )
    return Mesh(dp_shard=processes // planned.tp, tp=planned.tp)


def _cases(model: nn.Module, given: Any, data: int, multiple: int) -> list[Cases]:
    """Return two inputs of different size for each data-parallel rank; given ones are the same on all."""
    first = make_cases(model, given, multiple)
    if given is not None:
        return [first] * data
    more = [[materialise(case, seed=97 * rank + step) for step, case in enumerate(first)] for rank in range(1, data)]
    return [first, *more]


def _on_mesh(made: Plan, half: Plan, mesh: Mesh) -> Plan:
    """Return the tensor-parallel half of a plan with its other half put back, for this mesh and these shapes."""

    def put_back(fqn: str, tensor: TensorPlan) -> TensorPlan:
        local = list(tensor.local_shape)
        dim = made.parameters[fqn].fsdp_dim or 0
        if mesh.data == 1 or not local:
            return tensor
        dim = dim if local[dim] % mesh.dp_shard == 0 else 0
        local[dim] = -(-local[dim] // mesh.dp_shard)
        return replace(tensor, fsdp_dim=dim, local_shape=tuple(local))

    return replace(half, mesh=mesh, parameters={fqn: put_back(fqn, t) for fqn, t in half.parameters.items()})


def _crash(crashed: Crashed) -> Proof:
    """Return the proof of a forward, a backward or a step that fails on a rank."""
    last = (crashed.traceback.strip().splitlines() or [""])[-1]
    why = f"rank {crashed.rank} fails: {last}"[:300]
    return Proof(False, {}, {}, (Culprit("size", "", why, user_place(crashed.traceback)),), 1, (), FLOAT64, 0.0)


def _compare(wants: list[Outcome], gots: list[Outcome], mesh: Mesh) -> Proof:
    """Compare each rank's outputs, and the first rank's whole gradients and changes."""
    outputs: dict[str, float] = {}
    exact = Tolerance(FLOAT64, 1e-30)
    for number, got in enumerate(gots):
        for found, wanted in zip(got.outputs, wants[number // mesh.tp].outputs, strict=True):
            for path, want in wanted.items():
                error = exact.error(found[path], want) if path in found else float("inf")
                outputs[path] = max(outputs.get(path, 0.0), error)
    parameters: dict[str, float] = {}
    for found_gradients, wanted_gradients in zip(gots[0].gradients, wants[0].gradients, strict=True):
        floor = ZERO * max((float(g.abs().max()) for g in wanted_gradients.values() if g is not None), default=1.0)
        for name, gradient in wanted_gradients.items():
            error = _error(found_gradients.get(name), gradient, Tolerance(FLOAT64, floor))
            parameters[name] = max(parameters.get(name, 0.0), error)
    step = Tolerance(FLOAT64, LEARNING_RATE)  # relative to what a whole step is
    updates = {name: _error(gots[0].changes.get(name), change, step) for name, change in wants[0].changes.items()}
    errors = [*outputs.values(), *parameters.values(), *updates.values()]
    ok = bool(parameters) and all(error <= FLOAT64 for error in errors)
    return Proof(ok, parameters, outputs, (), mesh.tp, (), FLOAT64, 0.0, mesh, updates)


def _error(got: Tensor | None, want: Tensor | None, tolerance: Tolerance) -> float:
    if want is None or got is None:
        other = got if want is None else want
        return 0.0 if other is None or not bool(other.any()) else float("inf")
    return tolerance.error(got, want)
