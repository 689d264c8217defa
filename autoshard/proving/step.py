"""One training step of a model on several data-parallel batches: in one process, or as one rank of a group."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autoshard.errors import InvalidArgument
from autoshard.executor.execute import apply, make_mesh
from autoshard.executor.whole import full_gradients, full_parameters
from autoshard.inputs import ExampleInputs
from autoshard.outputs import tensors
from autoshard.plans import Plan
from autoshard.proving.double import Double
from autoshard.proving.objective import objective, whole
from autoshard.proving.parcel import Parcel, unpack

LEARNING_RATE = 1e-2
#: The first AdamW step is the sign of a gradient where that is above eps: so large an eps keeps its size.
_EPS = 1e-3

#: Of one data-parallel rank, one for each backward that is accumulated.
Cases = list[ExampleInputs]


@dataclass(frozen=True)
class Job:
    """What every rank gets: the model, the plan for the whole mesh, and each data-parallel rank's cases."""

    parcel: Parcel
    plan: Plan
    cases: list[Cases]


@dataclass(frozen=True)
class Outcome:
    """What one side gave.

    Attributes:
        outputs: per case, by path: of one data-parallel rank.
        gradients: per case, by name, whole: gradients after it, accumulated.
        changes: by name, whole: what one optimizer step added to a parameter.
    """

    outputs: list[dict[str, Tensor]]
    gradients: list[dict[str, Tensor | None]]
    changes: dict[str, Tensor]


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LEARNING_RATE, eps=_EPS)


def _forward(model: nn.Module, case: ExampleInputs, seed: int) -> tuple[dict[str, Tensor], Tensor]:
    """Return the outputs by path and the objective."""
    answer = model(*case.args, **case.kwargs)
    found = {path: whole(tensor) for path, tensor in tensors(answer) if tensor.is_floating_point()}
    return found, objective(found, seed)


def _seed(rank: int, step: int) -> int:
    return 1000 * rank + step


def reference(original: nn.Module, cases: list[Cases]) -> list[Outcome]:
    """Return what one process gives, for each data-parallel rank: the gradients and changes are the same objects."""
    model = copy.deepcopy(original)
    optimizer = _optimizer(model)
    outputs: list[list[dict[str, Tensor]]] = [[] for _ in cases]
    gradients: list[dict[str, Tensor | None]] = []
    with Double():
        for step in range(len(cases[0])):
            for rank, own in enumerate(cases):
                try:
                    found, value = _forward(model, own[step], _seed(rank, step))
                    (value / len(cases)).backward()
                except Exception as error:  # the user's own code, on the inputs that were found or given
                    raise InvalidArgument(
                        "the untouched model fails on its inputs: there is nothing to compare with",
                        got=f"{type(error).__name__}: {error}"[:300],
                        help="give example_inputs on which it runs",
                    ) from error
                outputs[rank].append({path: tensor.detach() for path, tensor in found.items()})
            gradients.append(_cloned({n: p.grad for n, p in model.named_parameters(remove_duplicate=False)}))
    optimizer.step()
    changes = _changes(original, dict(model.named_parameters(remove_duplicate=False)))
    return [Outcome(own, gradients, changes) for own in outputs]


def _cloned(gradients: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
    return {name: None if g is None else g.detach().clone() for name, g in gradients.items()}


def _changes(before: nn.Module, after: Mapping[str, Tensor]) -> dict[str, Tensor]:
    named = before.named_parameters(remove_duplicate=False)
    return {name: after[name].detach() - p.detach() for name, p in named if p.requires_grad}


def on_rank(payload: bytes) -> Outcome:
    """Be one rank: shard, run, step; the gradients and changes are left out on every rank but the first."""
    job: Job = pickle.loads(payload)
    original = unpack(job.parcel)
    model = copy.deepcopy(original)
    optimizer = _optimizer(model)
    apply(model, job.plan, make_mesh(job.plan, "cpu"), [optimizer])
    number = dist.get_rank()
    rank = number // job.plan.mesh.tp
    outcome = Outcome([], [], {})
    with Double():
        for step, case in enumerate(job.cases[rank]):
            found, value = _forward(model, case, _seed(rank, step))
            value.backward()
            outcome.outputs.append({path: tensor.detach() for path, tensor in found.items()})
            outcome.gradients.append(_cloned(full_gradients(model)))
    optimizer.step()
    outcome.changes.update(_changes(original, full_parameters(model)))
    return outcome if number == 0 else Outcome(outcome.outputs, [], {})
