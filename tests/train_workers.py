"""What the ranks run to train a parallelized model with every kind of optimizer, beside one process."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from model_workers import tokens
from models import Decoder, token_loss
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

import autoshard
from autoshard.optim.state import cut_like
from autoshard.plans import Plan
from autoshard.reading import read_plan

BATCH, LENGTH = 8, 5
Named = list[tuple[str, nn.Parameter]]


@dataclass(frozen=True)
class Case:
    """One optimizer, one way of its kernels, and when it is made.

    ``when``: ``"before"`` sharding, ``"populated"`` (before, and two steps taken), ``"after"`` (a factory).
    """

    kind: str
    way: str = "loop"
    when: str = "before"

    def __str__(self) -> str:
        return f"{self.kind} {self.way} {self.when}"


def build() -> nn.Module:
    """A decoder with biases, a tie and norms over heads, every value random."""
    torch.manual_seed(0)
    model = Decoder(layers=1, tied=True, head_norm=True, kv_heads=4)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def factories(case: Case) -> list[Callable[[Named], Optimizer]]:
    """Return what makes the case's optimizers of named parameters: two groups, decay on matrices only."""
    how: dict[str, Any] = {"loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}[case.way]

    def groups(named: Named) -> list[dict[str, Any]]:
        return [
            {"params": [item for item in named if item[1].dim() > 1], "weight_decay": 0.1},
            {"params": [item for item in named if item[1].dim() < 2]},
        ]

    if case.kind == "Muon":  # matrices for Muon, the rest for AdamW
        return [
            lambda named: torch.optim.Muon([item for item in named if item[1].dim() > 1], lr=0.01),
            lambda named: torch.optim.AdamW([i for i in named if i[1].dim() < 2], lr=0.01, eps=1e-3, **how),
        ]
    if case.kind == "LBFGS":
        return [lambda named: torch.optim.LBFGS([p for _, p in named], lr=0.1, max_iter=2, history_size=4)]
    extra: dict[str, Any] = {"momentum": 0.9, "nesterov": True} if case.kind == "SGD" else {"eps": 1e-3}
    make: Any = getattr(torch.optim, case.kind)
    return [lambda named: make(groups(named), lr=0.01, **extra, **how)]


def mean_loss(loss: Tensor) -> Tensor:
    """Return the loss over all data: every tp rank of a data rank has the same one."""
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def step(model: nn.Module, optimizers: list[Optimizer], rows: Tensor, average: Callable[[Tensor], Tensor]) -> float:
    """Take one step with clipping; return the loss before it."""

    def closure() -> Tensor:
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = token_loss(model(rows), rows)
        loss.backward()
        autoshard.clip_grad_norm_(model.parameters(), 1.0)
        # LBFGS decides by the loss: it must be the same on all ranks
        return average(loss)

    if isinstance(optimizers[0], torch.optim.LBFGS):
        return float(optimizers[0].step(closure))
    loss = closure()
    for optimizer in optimizers:
        optimizer.step()
    return float(loss)


def train(data: dict[str, Any], cases: list[Case], steps: int = 10) -> dict[str, dict[str, Any]]:
    """Return, by case, the largest differences of losses and parameters, and what is alive and held where."""
    plan = read_plan(data)
    return {str(case): _train(plan, case, steps) for case in cases}


def _train(plan: Plan, case: Case, steps: int) -> dict[str, Any]:
    reference = build()
    model = copy.deepcopy(reference)
    makes = factories(case)
    twins = [make(list(reference.named_parameters())) for make in makes]
    optimizers = [] if case.when == "after" else [make(list(model.named_parameters())) for make in makes]
    batches = [tokens(reference, BATCH, LENGTH, seed=100 + index) for index in range(steps + 2)]
    if case.when == "populated":
        for ids in batches[:2]:
            step(reference, twins, ids, Tensor.detach)
            step(model, optimizers, ids, Tensor.detach)
        model.zero_grad()
    old = [weakref.ref(parameter) for parameter in model.parameters()]
    kept = [[id(group) for group in optimizer.param_groups] for optimizer in optimizers]
    autoshard.parallelize(model, plan, optimizer=optimizers or makes)
    optimizers = optimizers or autoshard.optimizers(model)
    gc.collect()
    share, index = BATCH // plan.mesh.data, dist.get_rank() // plan.mesh.tp
    rows = slice(index * share, (index + 1) * share)
    losses = [
        (step(model, optimizers, ids[rows], mean_loss), step(reference, twins, ids, Tensor.detach))
        for ids in batches[2:]
    ]
    wants = dict(reference.named_parameters(remove_duplicate=False))
    gots = autoshard.full_parameters(model)
    return {
        "loss": max(abs(got - want) / want for got, want in losses),
        "parameters": max(float((got - wants[name]).detach().abs().max()) for name, got in gots.items()),
        "moved": max(float((p - wants[n]).detach().abs().max()) for n, p in build().named_parameters()),
        "alive": sum(ref() is not None for ref in old),
        "same groups": case.when == "after" or kept == [[id(g) for g in o.param_groups] for o in optimizers],
        "state": sum(_bytes(value) for optimizer in optimizers for value in _moments(optimizer)),
        "full state": sum(_bytes(value) for twin in twins for value in _moments(twin)),
    }


def _moments(optimizer: Optimizer) -> list[Tensor]:
    values = [value for values in optimizer.state.values() for value in values.values()]
    flat = [one for value in values for one in (value if isinstance(value, list) else [value])]
    return [value for value in flat if isinstance(value, Tensor) and value.dim()]


def _bytes(tensor: Tensor) -> int:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).nbytes


def from_meta(data: dict[str, Any]) -> dict[str, Any]:
    """Shard a model on meta with an optimizer made on it, give it storage and values, train two steps."""
    reference = build()
    with torch.device("meta"):
        model = Decoder(layers=1, tied=True, head_norm=True, kv_heads=4)
    plan = read_plan(data)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3, foreach=True)
    twin = torch.optim.AdamW(reference.parameters(), lr=0.01, eps=1e-3)
    autoshard.parallelize(model, plan, optimizer=optimizer)
    model.to_empty(device="cpu")
    values = dict(reference.named_parameters(remove_duplicate=False))
    with torch.no_grad():
        for name, parameter in model.named_parameters(remove_duplicate=False):
            parameter.copy_(cut_like(name, values[name].detach(), parameter))
    share, index = BATCH // plan.mesh.data, dist.get_rank() // plan.mesh.tp
    for seed in range(2):
        ids = tokens(reference, BATCH, LENGTH, seed)
        step(reference, [twin], ids, Tensor.detach)
        step(model, [optimizer], ids[index * share : (index + 1) * share], mean_loss)
    wants = dict(reference.named_parameters(remove_duplicate=False))
    return {
        "held": sum(
            entry is mine for entry, mine in zip(optimizer.param_groups[0]["params"], model.parameters(), strict=True)
        ),
        "names": len(list(model.parameters())),
        "parameters": max(
            float((got - wants[name]).detach().abs().max()) for name, got in autoshard.full_parameters(model).items()
        ),
    }


def refused(data: dict[str, Any], kind: str) -> str:
    """Return the error that an optimizer of a class below meets, before anything is changed."""
    model = build()
    optimizer = {"raw": ReadsMemory, "adafactor": torch.optim.Adafactor}[kind](model.parameters())
    first = next(model.parameters())
    try:
        autoshard.parallelize(model, read_plan(data), optimizer=optimizer)
    except autoshard.AutoshardError as error:
        assert next(model.parameters()) is first and optimizer.param_groups[0]["params"][0] is first
        return str(error)
    return ""


class Lion(Optimizer):
    """Somebody's optimizer: signs of a momentum, written with ordinary tensor operations."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
                parameter.sub_((momentum * 0.9 + parameter.grad * 0.1).sign() * group["lr"])
                momentum.mul_(0.99).add_(parameter.grad, alpha=0.01)


class ReadsMemory(Lion):
    """What a kernel of its own does: it asks where the numbers are."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            assert all(parameter.data_ptr() for parameter in group["params"])


def somebody_elses(data: dict[str, Any]) -> float:
    """Train with an optimizer that is not torch's; return the difference from one process."""
    reference, plan = build(), read_plan(data)
    model = copy.deepcopy(reference)
    optimizer, twin = Lion(model.parameters()), Lion(reference.parameters())
    autoshard.parallelize(model, plan, optimizer=optimizer)
    assert not optimizer.state
    share, index = BATCH // plan.mesh.data, dist.get_rank() // plan.mesh.tp
    for seed in range(3):
        ids = tokens(reference, BATCH, LENGTH, seed)
        step(reference, [twin], ids, Tensor.detach)
        step(model, [optimizer], ids[index * share : (index + 1) * share], mean_loss)
    wants = dict(reference.named_parameters(remove_duplicate=False))
    gots = autoshard.full_parameters(model)
    return max(float((got - wants[name]).detach().abs().mean()) for name, got in gots.items())
