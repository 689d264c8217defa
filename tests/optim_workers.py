"""What the spawned ranks of the optimizer tests do: stock ``parallelize_module`` and ``fully_shard``, nothing of ours.

Each case runs beside an unsharded twin in the same process, which sees the whole batch.
"""

from __future__ import annotations

import copy
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.multiprocessing.spawn import start_processes

from autoshard.optim.clip import clip_grad_norm_
from autoshard.optim.remap import snapshot
from autoshard.optim.state import cut_like

BATCH = 4
Result = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One run: degrees, model, optimizer, and whether it took steps before sharding."""

    degrees: tuple[int, int, int]
    model: str
    optimizer: str
    how: str
    populated: bool
    forward_first: bool = False

    def __str__(self) -> str:
        mesh = "x".join(map(str, self.degrees))
        state = "populated" if self.populated else "empty"
        return "-".join([mesh, self.model, self.optimizer, self.how, state] + ["forward"] * self.forward_first)


class Mlp(nn.Module):
    """Sizes that no degree divides evenly are FSDP's: 10 rows over tp=2 are 5, over dp_shard=2 3 and 2."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 10)
        self.down = nn.Linear(10, 6)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(torch.tanh(self.up(x)))
        return out


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 6)
        self.mlp = Mlp()
        self.head = nn.Linear(6, 10, bias=False)
        self.head.weight = self.table.weight

    def forward(self, rows: Tensor) -> Tensor:
        out: Tensor = self.head(self.mlp(self.table(rows)))
        return out


def build(case: Case) -> nn.Module:
    torch.manual_seed(0)
    return Mlp() if case.model == "mlp" else Tied()


def batch(case: Case, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    if case.model == "mlp":
        return torch.randn(BATCH, 6, generator=generator), torch.randn(BATCH, 6, generator=generator)
    return torch.randint(0, 10, (BATCH, 3), generator=generator), torch.randn(BATCH, 3, 10, generator=generator)


def make_optimizer(case: Case, model: nn.Module) -> torch.optim.Optimizer:
    named = dict(model.named_parameters())
    groups: list[dict[str, Any]] = [
        {"params": [item for item in named.items() if item[1].dim() > 1], "weight_decay": 0.1},
        {"params": [item for item in named.items() if item[1].dim() < 2], "weight_decay": 0.0},
    ]
    how: dict[str, Any] = {} if case.how == "default" else {case.how: True}
    if case.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=0.05, momentum=0.9, **how)
    if case.optimizer == "adagrad":
        return torch.optim.Adagrad(groups, lr=0.05, eps=1e-3, **how)
    return torch.optim.AdamW(groups, lr=0.02, eps=1e-3, **how)


def shard(case: Case, model: nn.Module, mesh: DeviceMesh) -> None:
    replicate, cut, tp = case.degrees
    if tp > 1:
        mlp = "" if case.model == "mlp" else "mlp."
        plan: dict[str, Any] = {mlp + "up": ColwiseParallel(), mlp + "down": RowwiseParallel()}
        if case.model == "tied":
            plan["table"] = RowwiseParallel(input_layouts=Replicate())
            plan["head"] = ColwiseParallel(output_layouts=Replicate())
        parallelize_module(model, mesh["tp"], plan)
        if isinstance(model, Tied):
            model.head.weight = model.table.weight
    if replicate * cut > 1:
        data = mesh["dp_replicate", "dp_shard"] if replicate > 1 else mesh["dp_shard"]
        if isinstance(model, Tied):
            fully_shard(model.mlp, mesh=data)
        fully_shard(model, mesh=data)


def train(
    case: Case, model: nn.Module, tools: tuple[torch.optim.Optimizer, Any], steps: range, part: int, parts: int
) -> None:
    optimizer, scheduler = tools
    for step in steps:
        x, y = batch(case, step)
        rows = slice(part * BATCH // parts, (part + 1) * BATCH // parts)
        loss: Any = nn.functional.mse_loss(model(x[rows]), y[rows])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()


def full(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def local(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def with_tools(case: Case, model: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
    optimizer = make_optimizer(case, model)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)


def follow(case: Case) -> Result:
    """Train, shard, train on; return how far the parameters and the state are from the twin's."""
    mesh = init_device_mesh("cpu", case.degrees, mesh_dim_names=("dp_replicate", "dp_shard", "tp"))
    data = case.degrees[0] * case.degrees[1]
    part = dist.get_rank() // case.degrees[2]
    model, twin = build(case), build(case)
    tools, twin_tools = with_tools(case, model), with_tools(case, twin)
    first = range(2) if case.populated else range(0)
    for one, its in ((model, tools), (twin, twin_tools)):
        train(case, one, its, first, 0, 1)

    before = snapshot(model, [tools[0]])
    before.release()
    shard(case, model, mesh)
    if case.forward_first:
        # the root stays unsharded after a forward: its parameters are then plain and full
        with torch.no_grad():
            model(batch(case, 0)[0])
    before.restore(model)
    cut = case.populated or case.optimizer == "adagrad"
    whole_state = _state_distance(tools[0], twin_tools[0]) if cut else 0.0
    train(case, model, tools, range(2, 5), part, data)
    train(case, twin, twin_tools, range(2, 5), 0, 1)

    pairs = zip(model.named_parameters(), twin.named_parameters(), strict=True)
    moments = [
        value
        for values in tools[0].state.values()
        for key, value in values.items()
        if key in ("exp_avg", "momentum_buffer", "sum")
    ]
    return {
        "parameters": max((full(a) - full(b)).abs().max().item() for (_, a), (_, b) in pairs),
        "names": [name for name, _ in model.named_parameters()] == [name for name, _ in twin.named_parameters()],
        "state_when_cut": whole_state,
        "state": _state_distance(tools[0], twin_tools[0]),
        "stale": before.stale(),
        # FSDP pads the storage of uneven parameters; their state needs no padding
        "parameter_bytes": sum(local(p).nbytes for p in model.parameters()),
        "moment_bytes": sum(local(m).untyped_storage().nbytes() for m in moments),
        "full_bytes": sum(p.nbytes for p in twin.parameters()),
        "lr": [group["lr"] for group in tools[0].param_groups] == [group["lr"] for group in twin_tools[0].param_groups],
        "state_dict": sorted(tools[0].state_dict()["state"]) == sorted(twin_tools[0].state_dict()["state"]),
    }


def _state_distance(optimizer: torch.optim.Optimizer, twin: torch.optim.Optimizer) -> float:
    worst = 0.0
    mine, other = (
        [x.state[p] for group in x.param_groups for p in group["params"] if p in x.state] for x in (optimizer, twin)
    )
    for values, expected in zip(mine, other, strict=True):
        assert list(values) == list(expected)
        for key, value in values.items():
            worst = max(worst, (full(value).double() - full(expected[key]).double()).abs().max().item())
    return worst


def spoiled(case: Case) -> Result:
    """Shard and step without release and restore."""
    mesh = init_device_mesh("cpu", case.degrees, mesh_dim_names=("dp_replicate", "dp_shard", "tp"))
    model = build(case)
    tools = with_tools(case, model)
    full_bytes = sum(p.nbytes for p in model.parameters())
    before = snapshot(model, [tools[0]])
    shard(case, model, mesh)
    start = [full(p).clone() for p in model.parameters()]
    train(case, model, tools, range(2), 0, 1)
    return {
        "moved": max((full(p) - s).abs().max().item() for p, s in zip(model.parameters(), start, strict=True)),
        "stale_bytes": sum(size for _, size in before.stale()),
        "full_bytes": full_bytes,
    }


def scalar(case: Case) -> Result:
    """A 0-dim parameter beside a matrix: its moments become DTensors, its step count does not."""
    mesh = init_device_mesh("cpu", case.degrees, mesh_dim_names=("dp_replicate", "dp_shard", "tp"))["dp_shard"]
    model = nn.Linear(4, 4, bias=False)
    model.register_parameter("scale", nn.Parameter(torch.tensor(2.0)))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    before = snapshot(model, [optimizer])
    before.release()
    for name, parameter in list(model.named_parameters()):
        model.register_parameter(name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Replicate()])))
    before.restore(model)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state = optimizer.state[model.get_parameter("scale")]
    return {"sharded": sorted(key for key, value in state.items() if isinstance(value, DTensor)), "step": state["step"]}


def clip(case: Case) -> Result:
    """Gradients on two meshes and plain ones: total norm and clipped gradients against one process."""
    mesh = init_device_mesh("cpu", case.degrees, mesh_dim_names=("dp_replicate", "dp_shard", "tp"))
    model = build(case)
    shard(case, model, mesh)
    # a plain parameter, and one on a mesh of its own: what is left of tp alone
    beside = [nn.Parameter(torch.zeros(3)), nn.Parameter(distribute_tensor(torch.zeros(5), mesh["tp"], [Replicate()]))]
    twin = [nn.Parameter(torch.zeros(p.shape)) for p in [*model.parameters(), *beside]]
    worst, norms, plain = 0.0, 0.0, True
    for norm_type in (1.0, 2.0, float("inf")):
        for foreach in (None, True, False):
            generator = torch.Generator().manual_seed(7)
            for parameter, other in zip([*model.parameters(), *beside], twin, strict=True):
                other.grad = torch.randn(other.shape, generator=generator)
                parameter.grad = cut_like("", other.grad.clone(), parameter)
            total = clip_grad_norm_([*model.parameters(), *beside], 0.5, norm_type, foreach=foreach)
            expected = torch.nn.utils.clip_grad_norm_(twin, 0.5, norm_type)
            plain = plain and type(total) is Tensor and total.dim() == 0
            norms = max(norms, (total - expected).abs().item() / expected.item())
            for parameter, other in zip([*model.parameters(), *beside], twin, strict=True):
                assert parameter.grad is not None and other.grad is not None
                worst = max(worst, (full(parameter.grad) - other.grad).abs().max().item())
    gathered = [torch.zeros(()) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, total)
    meshes = {p.device_mesh if isinstance(p, DTensor) else None for p in [*model.parameters(), *beside]}
    try:
        torch.nn.utils.clip_grad_norm_([*model.parameters(), *beside], 0.5)
    except RuntimeError as error:
        stock = str(error)
    else:
        stock = ""
    return {
        "norm": norms,
        "gradients": worst,
        "plain": plain,
        "equal": all(torch.equal(value, total) for value in gathered),
        "meshes": len(meshes),
        "stock": stock,
        "units": sum(isinstance(module, FSDPModule) for module in model.modules()),
    }


def run(rank: int, world: int, path: str, jobs: list[tuple[Callable[[Case], Result], Case]]) -> None:
    """Run every job on this rank and write the results, or their tracebacks, to ``path``."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}/store", rank=rank, world_size=world)
    results: dict[str, Result] = {}
    for job, case in jobs:
        try:
            results[f"{job.__name__}-{case}"] = job(copy.copy(case))
        except Exception:  # noqa: BLE001  # the test that asked for it shows it
            results[f"{job.__name__}-{case}"] = {"error": traceback.format_exc()}
    torch.save(results, Path(path) / f"rank{rank}.pt")
    dist.destroy_process_group()


def spawn(world: int, path: Path, jobs: list[tuple[Callable[[Case], Result], Case]]) -> list[dict[str, Result]]:
    """Run the jobs on ``world`` gloo ranks; return the results of each rank."""
    start: Any = start_processes
    start(run, (world, str(path), jobs), nprocs=world, start_method="spawn")
    return [torch.load(path / f"rank{rank}.pt", weights_only=False) for rank in range(world)]
