"""Run a model forward and backward on each input, and keep what came out: on one process, or on simulated ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from autoshard.errors import AutoshardError, InvalidArgument
from autoshard.inputs import ExampleInputs
from autoshard.outputs import tensors
from autoshard.proving.double import Double
from autoshard.proving.objective import whole
from autoshard.proving.observe import Observed, observe
from autoshard.proving.simulate import on_each_rank, simulated
from autoshard.proving.subject import Cut, Subject
from autoshard.proving.written import one_per_rank

#: By output path, what the objective multiplies it with.
Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Run:
    """What one run gave: outputs and gradients by name, each on every rank, and what was observed on the way."""

    outputs: dict[str, list[Tensor]]
    gradients: dict[str, list[Tensor] | None]
    observed: Observed


@dataclass(frozen=True)
class Failed:
    """A run on the ranks' shares that raised.

    Attributes:
        error: what the user's code raised.
        module: the innermost module that was running, ``""`` outside of the model or in its backward.
    """

    error: Exception
    module: str


def reference(
    model: nn.Module, cases: list[ExampleInputs], weightings: list[Weights], two_modes: bool = False
) -> list[Run]:
    """Run the untouched model; fills in the weights of the objective.

    Args:
        model: the model.
        cases: its inputs.
        weightings: one for each, to fill in.
        two_modes: whether to run forward without gradients too: those outputs have a name of their own.

    Raises:
        InvalidArgument: its own forward or backward fails.
    """
    seen: list[Observed] = []
    try:
        return run(model, cases, weightings, lambda tensor: [tensor.detach()], seen, two_modes)
    except AutoshardError:
        raise
    except Exception as error:
        raise InvalidArgument(
            "the untouched model fails on its inputs: there is nothing to compare with",
            at=(seen[-1].running if seen else "") or "the model",
            got=f"{type(error).__name__}: {error}"[:300],
            help="give example_inputs on which it runs",
        ) from error


def shares(
    model: nn.Module, subject: Subject, cases: list[ExampleInputs], weightings: list[Weights]
) -> tuple[list[Run] | Failed, Mapping[str, Cut]]:
    """Run the model under a plan on all ranks; also return how it cuts each parameter.

    Raises:
        AutoshardError: the plan cannot be applied.
    """
    cuts: Mapping[str, Cut] = {}
    seen: list[Observed] = []
    with simulated(subject.tp):
        try:
            cuts = subject.install(model)
        except AutoshardError:
            raise
        except Exception as error:  # noqa: BLE001 - a style that torch itself refuses
            return Failed(error, ""), cuts
        try:
            read = partial(on_each_rank, world=subject.tp)
            return run(model, cases, weightings, read, seen, subject.two_modes), cuts
        except Exception as error:  # noqa: BLE001 - the user's own code fails on a share: that is the finding
            return Failed(error, seen[-1].running if seen else ""), cuts


def run(
    model: nn.Module,
    cases: list[ExampleInputs],
    weightings: list[Weights],
    read: Callable[[Tensor], list[Tensor]],
    seen: list[Observed],
    two_modes: bool = False,
) -> list[Run]:
    """Run forward and backward on each case, gradients accumulated, and return what there was after each."""
    runs: list[Run] = []
    for number, (case, weights) in enumerate(zip(cases, weightings, strict=True)):
        with torch.random.fork_rng(devices=[]), observe(model, read) as observed, Double():
            torch.manual_seed(number)  # what the forward draws, both models draw
            seen.append(observed)
            args, kwargs = tree_map_only(Tensor, one_per_rank, (case.args, case.kwargs))
            answer = model(*args, **kwargs)
            found = {path: whole(tensor) for path, tensor in tensors(answer) if tensor.is_floating_point()}
            _objective(found, weights).backward()
        if two_modes:
            with torch.random.fork_rng(devices=[]), torch.no_grad(), Double():
                torch.manual_seed(number)
                answer = model(*args, **kwargs)
            more = {f"{path} without gradients".strip(): tensor for path, tensor in tensors(answer)}
            found |= {path: whole(tensor) for path, tensor in more.items() if tensor.is_floating_point()}
        outputs = {path: [t.clone() for t in read(tensor)] for path, tensor in found.items()}
        gradients = {
            fqn: None if p.grad is None else [t.clone() for t in read(_as_held(p.grad, p))]
            for fqn, p in model.named_parameters(remove_duplicate=False)
        }
        runs.append(Run(outputs, gradients, observed))
    return runs


def _as_held(gradient: Tensor, parameter: Tensor) -> Tensor:
    """Return a gradient in its parameter's placements: an optimizer converts a DTensor that is a sum by itself."""
    if not isinstance(gradient, DTensor) or not isinstance(parameter, DTensor):
        return gradient
    return gradient.redistribute(placements=parameter.placements)


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
