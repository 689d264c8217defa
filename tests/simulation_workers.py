"""The same forward and backward in the simulation and on a gloo rank."""

from __future__ import annotations

from typing import Any

import torch
from models import build, logits_of
from torch import Tensor, nn

import autoshard
from autoshard.executor.execute import apply, make_mesh
from autoshard.plans import Plan
from autoshard.proving.simulate import on_each_rank

LENGTHS = (7, 5)
#: The parameter whose gradient sum is taken out of the plan where a wrong one is asked for.
DROPPED = "blocks.0.attention.q_norm.weight"


def model_and_plan(name: str, tp: int, drop: bool = False) -> tuple[nn.Module, Plan]:
    model = build(name)
    data = autoshard.plan(model, world=tp, tp=tp).to_dict()
    if drop:
        data["parameters"][DROPPED]["grad_sum"] = None
    return model, Plan.from_dict(data)


def make_inputs() -> dict[int, Tensor]:
    """Ids by their length; made outside of the simulation, where each rank would draw its own."""
    generator = torch.Generator().manual_seed(1)
    return {length: torch.randint(1, 24, (2, length), generator=generator) for length in LENGTHS}


def backward(model: nn.Module, inputs: dict[int, Tensor]) -> dict[str, Any]:
    """Two accumulated backwards; return outputs and gradients by name."""
    found: dict[str, Any] = {}
    for length, ids in inputs.items():
        logits = logits_of(model(ids))
        (logits * _weights(logits.shape)).sum().backward()
        found[f"logits {length}"] = logits
    found.update({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    return found


def run_for_real(name: str, tp: int, drop: bool = False) -> dict[str, Tensor]:
    model, plan = model_and_plan(name, tp, drop)
    apply(model, plan, make_mesh(plan, "cpu"))
    return {key: on_each_rank(tensor, 1)[0].clone() for key, tensor in backward(model, make_inputs()).items()}


def _weights(shape: torch.Size) -> Tensor:
    return torch.linspace(-1, 1, shape.numel(), dtype=torch.float64).view(shape)
