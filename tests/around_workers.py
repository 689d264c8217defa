"""What the ranks run to see whether tools around an optimizer still do their work on a sharded model."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from executor_models import Config, Decoder, Report, decoder_plan, loss_of
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn
from workers import Twins

import autoshard
from autoshard.errors import AutoshardError
from autoshard.executor.execute import apply, make_mesh
from autoshard.executor.whole import full_parameters
from autoshard.plans import Mesh

Made = list[torch.optim.Optimizer]


def adamw(model: nn.Module, **how: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3, **(how or {"foreach": True}))


def step(optimizers: Iterable[torch.optim.Optimizer], set_to_none: bool = True) -> None:
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)


def said_by(action: Callable[[], Any]) -> str:
    try:
        action()
    except AutoshardError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def overflow_on_one_rank(kind: type[torch.amp.GradScaler], mesh: Mesh, how: dict[str, Any]) -> dict[str, Any]:
    """One scaled step beside an unscaled one, then one in which a cut gradient of the last rank overflows."""
    twins = Twins(Config(dtype=torch.float32, slopes=False), mesh)
    ours, theirs = adamw(twins.model, **how), adamw(twins.whole)
    scaler = kind("cpu", init_scale=2.0**10)
    ids = twins.ids()
    loss_of(twins.whole(ids), ids).backward()
    theirs.step()
    scaler.scale(loss_of(twins.model(twins.mine(ids)), twins.mine(ids))).backward()
    scaler.unscale_(ours)
    norm = autoshard.clip_grad_norm_(twins.model.parameters(), 1e9)
    scaler.step(ours)
    scaler.update()
    twins.compare_parameters()
    ours.zero_grad()
    scaler.scale(loss_of(twins.model(twins.mine(ids)), twins.mine(ids))).backward()
    gradient = dict(twins.model.named_parameters())["blocks.1.feed.up.weight"].grad
    assert isinstance(gradient, DTensor)
    if dist.get_rank() == dist.get_world_size() - 1:
        gradient.to_local()[0, 0] = float("inf")
    # so that the first gradient torch looks at is whole over tp
    ours.param_groups[0]["params"].sort(key=lambda p: p.dim())
    before = [_local(p).clone() for p in twins.model.parameters()]
    scaler.step(ours)
    scaler.update()
    after = [_local(p) for p in twins.model.parameters()]
    moved = sum(float((a - b).abs().sum()) for a, b in zip(after, before, strict=True))
    return {"parameters": twins.report.parameters, "norm": float(norm), "moved": moved, "scale": scaler.get_scale()}


def _local(parameter: Tensor) -> Tensor:
    return (parameter.to_local() if isinstance(parameter, DTensor) else parameter).detach()


def scheduled(mesh: Mesh, early: bool) -> tuple[Report, bool]:
    """A scheduler made before the model is sharded, or after."""
    made: Made = []
    plans: list[torch.optim.lr_scheduler.LRScheduler] = []

    def prepare(model: nn.Module) -> None:
        made.append(adamw(model))
        if early:
            plans.append(one_cycle(made[-1]))

    twins = Twins(Config(), mesh, prepare=prepare, optimizers=made)
    if not early:
        plans.append(one_cycle(made[0]))
    made.append(adamw(twins.whole))
    plans.append(one_cycle(made[1]))
    for _ in range(3):
        twins.step()
        step(made)
        for one in plans:
            one.step()
    twins.compare_parameters()
    rates = [optimizer.param_groups[0]["lr"] for optimizer in made]
    return twins.report, rates[0] == rates[1]


def one_cycle(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.02, total_steps=10)


def zeroed(mesh: Mesh, set_to_none: bool) -> Report:
    """Three steps, with gradients zeroed or dropped between."""
    twins = Twins(Config(), mesh)
    made = [adamw(twins.whole), adamw(twins.model)]
    for _ in range(3):
        twins.step(divide=2)
        twins.step(divide=2)
        twins.compare_gradients("two backwards")
        step(made, set_to_none)
    twins.compare_parameters()
    return twins.report


def averaged(mesh: Mesh) -> tuple[Report, list[str]]:
    """An average of weights: copied before sharding, sharded by the same plan, updated without communication."""
    averages: list[AveragedModel] = []

    def average(model: nn.Module) -> None:
        averages.append(AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)))

    twins = Twins(Config(), mesh, prepare=average)
    average(twins.whole)
    apply(averages[0].module, twins.plan, twins.device_mesh)
    made = [adamw(twins.model), adamw(twins.whole)]
    for _ in range(3):
        twins.step()
        step(made)
        for one, model in zip(averages, (twins.model, twins.whole), strict=True):
            one.update_parameters(model)
    twins.model, twins.whole = averages[0].module, averages[1].module  # type: ignore[assignment]
    twins.compare_parameters()
    with torch.no_grad():
        twins.forward_only(1, 5)
    said = [said_by(lambda: copy.deepcopy(twins.model)), said_by(lambda: AveragedModel(twins.model))]
    return twins.report, said


class Normed(nn.Module):
    """A batch norm between two linears."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16)
        self.down = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(torch.relu(self.norm(self.up(x))))
        return y


def batch_norm(mesh: Mesh) -> float:
    """Error of running statistics that ``update_bn`` computes, each rank from the whole data."""
    torch.manual_seed(0)
    whole = Normed().double()
    model = copy.deepcopy(whole)
    data = [torch.randn(4, 8, dtype=torch.float64) for _ in range(3)]
    plan = autoshard.plan(model, mesh.world, tp=mesh.tp, dp_shard=mesh.dp_shard, example_inputs=(data[0],))
    autoshard.parallelize(model, plan)
    for one in (whole, model):
        update_bn(data, one)
    wanted = dict(whole.named_buffers())
    found = {name: value for name, value in model.state_dict().items() if name in wanted}
    # those of cut channels are cut with them, and whole in a state dict
    wholes = {name: v.full_tensor() if isinstance(v, DTensor) else v for name, v in found.items()}
    return max(float((wholes[name] - buffer).abs().max()) for name, buffer in wanted.items())


def unfrozen(mesh: Mesh) -> Report:
    """Parameters that are frozen after sharding, and later get a param group of their own."""
    twins = Twins(Config(), mesh)
    made: Made = []
    for model in (twins.whole, twins.model):
        late = [p for n, p in model.named_parameters() if "blocks.0" in n]
        for parameter in late:
            parameter.requires_grad_(False)
        made.append(torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, eps=1e-3))
    for number in range(4):
        if number == 2:
            for model, optimizer in zip((twins.whole, twins.model), made, strict=True):
                late = [p for p in model.parameters() if not p.requires_grad]
                for parameter in late:
                    parameter.requires_grad_(True)
                optimizer.add_param_group({"params": late, "lr": 3e-3, "foreach": True})
        twins.step()
        step(made)
    twins.compare_parameters()
    return twins.report


def planned_frozen(mesh: Mesh) -> str:
    """What a forward says once a parameter takes a gradient that the plan knows as frozen."""
    model = Decoder(Config())
    model.block(0).attention.q_norm.weight.requires_grad_(False)
    plan = decoder_plan(model, mesh)
    apply(model, plan, make_mesh(plan, "cpu"))
    ids = torch.arange(14).view(2, 7)
    model(ids)
    dict(model.named_parameters())["blocks.0.attention.q_norm.weight"].requires_grad_(True)
    return said_by(lambda: model(ids))


def stepping_in_backward(mesh: Mesh) -> Report:
    """A hook on every accumulated gradient that takes the optimizer's step at once."""
    twins = Twins(Config(), mesh)
    for model in (twins.whole, twins.model):
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(_descend)
    for _ in range(2):
        twins.step()
    twins.compare_parameters()
    return twins.report


def _descend(parameter: Tensor) -> None:
    with torch.no_grad():
        parameter.sub_(parameter.grad, alpha=0.05)  # type: ignore[arg-type]
    parameter.grad = None


def halving(mesh: Mesh) -> tuple[Report, str]:
    """A hook that changes gradients: as in one process over tp, refused by name under FSDP."""
    twins = Twins(Config(), mesh)
    ids = twins.ids()
    for model in (twins.whole, twins.model):
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: gradient * 0.5)
    said = said_by(lambda: twins.model(twins.mine(ids)))
    if said == "nothing":
        twins.step()
        twins.compare_gradients("halved")
    return twins.report, said


def clipped_by_value(mesh: Mesh) -> tuple[float, str]:
    """Error of gradients clipped by value; and what a gradient that is no sum yet says."""
    twins = Twins(Config(), mesh)
    twins.step()
    plain = nn.Parameter(torch.zeros(3))
    plain.grad = torch.tensor([-5.0, 0.001, 5.0])
    nn.utils.clip_grad_value_(twins.whole.parameters(), 0.01)
    autoshard.clip_grad_value_([*twins.model.parameters(), plain], 0.01)
    twins.compare_gradients("clipped")
    assert plain.grad.tolist() == torch.tensor([-0.01, 0.001, 0.01]).tolist()
    some = next(twins.model.parameters())
    assert isinstance(some, DTensor)
    odd = dataclasses.make_dataclass("Odd", ["grad"])(_partial(some))
    said = said_by(lambda: autoshard.clip_grad_value_([odd], 0.01))
    return max(twins.report.gradients.values()), said


def _partial(parameter: DTensor) -> DTensor:
    from torch.distributed.tensor import Partial

    mesh = parameter.device_mesh
    return DTensor.from_local(torch.ones(2), mesh, [Partial()] * mesh.ndim, run_check=False)


def saved_and_loaded(mesh: Mesh) -> Report:
    """A scheduler's and a scaler's state go through their state dicts as ever."""
    twins = Twins(Config(), mesh)
    made = [adamw(twins.whole), adamw(twins.model)]
    plans = [one_cycle(optimizer) for optimizer in made]
    twins.step()
    step(made)
    for one in plans:
        one.step()
    scaler = autoshard.GradScaler("cpu", init_scale=8.0)
    scaler.load_state_dict({**scaler.state_dict(), "scale": 4.0})
    assert scaler.get_scale() == 4.0
    again = adamw(twins.model)
    plan = one_cycle(again)
    again.load_state_dict(made[1].state_dict())
    plan.load_state_dict(plans[1].state_dict())
    twins.step()
    step([made[0], again])
    twins.compare_parameters()
    assert full_parameters(twins.model).keys() == dict(twins.whole.named_parameters(remove_duplicate=False)).keys()
    return twins.report
