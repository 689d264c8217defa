"""What the ranks run to hold float32 masters of a bfloat16 model against the same in one process."""

from __future__ import annotations

import dataclasses
import gc
from typing import Any
from unittest import mock

import memory_workers
import parts_models
import torch
import torch.distributed as dist
from executor_models import Config, Decoder, decoder_plan, loss_of
from live_bytes import LiveBytes
from models import token_loss
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

import autoshard
from autoshard.executor.execute import apply, make_mesh
from autoshard.executor.training import PLAIN, Training
from autoshard.executor.whole import full_parameters
from autoshard.plans import Mesh, Plan
from autoshard.reading import read_plan

STEPS, RATE = 5, 1e-5
FROZEN = "blocks.0.feed.up.weight"
NARROW = torch.bfloat16
MASTERS = Training(masters=torch.float32)


def build(kind: str, mesh: Mesh) -> tuple[nn.Module, Plan]:
    """A bfloat16 model with ties, scalars and a frozen weight, or one with parameters in parts and in slices."""
    if kind == "parts":
        parts = parts_models.Model()
        parts.to(NARROW)
        plan = parts_models.plan_of(parts, mesh)
        named = {n: dataclasses.replace(t, dtype="bfloat16") for n, t in plan.parameters.items()}
        others = {n: dataclasses.replace(t, dtype="bfloat16") for n, t in plan.buffers.items()}
        return parts, dataclasses.replace(plan, parameters=named, buffers=others)
    decoder = Decoder(Config(dtype=NARROW))
    decoder.get_parameter(FROZEN).requires_grad_(False)
    return decoder, decoder_plan(decoder, mesh)


def batch(kind: str, mesh: Mesh, number: int) -> Tensor:
    generator = torch.Generator().manual_seed(number)
    if kind == "parts":
        return torch.randn(2 * mesh.data, 5, parts_models.HIDDEN, generator=generator).to(NARROW)
    return torch.randint(0, 32, (2 * mesh.data, 7), generator=generator)


def loss(model: nn.Module, given: Tensor) -> Tensor:
    answer = model(given).float()
    return answer.square().mean() if given.is_floating_point() else loss_of(answer, given)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    # eps: where a gradient is all rounding, its sign must not decide the step
    return torch.optim.AdamW(parameters, lr=RATE, eps=1e-3, foreach=True)


def reference(kind: str, mesh: Mesh, compute: torch.dtype = NARROW) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Train in one process: float32 masters, and a copy in ``compute`` that computes. Returns the start and the end."""
    model, _ = build(kind, mesh)
    narrow = dict(model.named_parameters())
    masters = {name: nn.Parameter(p.detach().float()) for name, p in narrow.items()}
    model.to(compute)
    start = {name: p.detach().clone() for name, p in masters.items()}
    optimizer = adamw(masters.values())
    for number in range(STEPS):
        model.zero_grad()
        with torch.no_grad():
            for name, p in narrow.items():
                p.copy_(masters[name])
        loss(model, _in(batch(kind, mesh, number), compute)).backward()
        for name, p in narrow.items():
            masters[name].grad = None if p.grad is None else p.grad.float()
        optimizer.step()
    return start, {name: p.detach() for name, p in masters.items()}


def _in(given: Tensor, dtype: torch.dtype) -> Tensor:
    return given.to(dtype) if given.is_floating_point() else given


def trained(kind: str, mesh: Mesh, training: Training) -> dict[str, Any]:
    """Train sharded; how far the movement of all parameters is from that of the reference, and what dtypes were."""
    model, plan = build(kind, mesh)
    optimizer = adamw(model.parameters())
    buffers = {name: b.dtype for name, b in model.named_buffers()}
    apply(model, plan, make_mesh(plan, "cpu"), [optimizer], training=training)
    seen: set[torch.dtype] = set()

    def watch(module: nn.Module, args: Any, answer: Any) -> None:
        seen.update(x.dtype for x in tree_leaves((args, answer)) if isinstance(x, Tensor) and x.is_floating_point())

    for module in model.modules():
        module.register_forward_hook(watch)
    for number in range(STEPS):
        mine = batch(kind, mesh, number).chunk(mesh.data)[dist.get_rank() // mesh.tp]
        loss(model, mine).backward()
        optimizer.step()
        optimizer.zero_grad()
    start, wanted = reference(kind, mesh)
    got = {name: p.float() for name, p in full_parameters(model).items() if name in wanted}
    in_float32 = reference(kind, mesh, torch.float32)[1]
    moved = _norm({name: wanted[name] - start[name] for name in wanted})
    named = dict(model.named_parameters())
    return {
        "rounding": _norm({name: in_float32[name] - wanted[name] for name in wanted}) / moved,
        "error": _norm({name: got[name] - wanted[name] for name in wanted}) / moved,
        "held": {p.dtype for p in named.values() if p.requires_grad},
        "frozen": {p.dtype for p in named.values() if not p.requires_grad},
        "sharded": all(isinstance(p, DTensor) for p in named.values()),
        "state": {value.dtype for values in optimizer.state.values() for value in values.values() if value.dim()},
        "saved": {value.dtype for name, value in model.state_dict().items() if name in named and name != FROZEN},
        "seen": seen,
        "scalars": {getattr(module, name).dtype for module, name in _scalars(model)},
        "buffers": buffers == {name: b.dtype for name, b in model.named_buffers()},
    }


def _scalars(model: nn.Module) -> list[tuple[nn.Module, str]]:
    return [(m, name) for m in model.modules() for name, p in m._parameters.items() if p is not None and p.dim() == 0]


def _norm(tensors: dict[str, Tensor]) -> float:
    return float(torch.stack([t.norm() for t in tensors.values()]).norm())


def populated(kind: str, mesh: Mesh) -> tuple[float, set[torch.dtype], int]:
    """Give an optimizer with bfloat16 moments: the error and the dtypes of what they became, and how many."""
    model, plan = build(kind, mesh)
    optimizer = adamw(model.parameters())
    loss(model, batch(kind, mesh, 0)).backward()
    optimizer.step()
    optimizer.zero_grad()
    old = {n: optimizer.state[p]["exp_avg"].float() for n, p in model.named_parameters() if p in optimizer.state}
    apply(model, plan, make_mesh(plan, "cpu"), [optimizer], training=MASTERS)
    new = {n: optimizer.state[p]["exp_avg"] for n, p in model.named_parameters() if p in optimizer.state}
    errors = [float((new[name].full_tensor() - value).abs().max()) for name, value in old.items()]
    return max(errors), {value.dtype for value in new.values()}, len(new)


class Widest(LiveBytes):
    """Knows also the most elements that a float32 tensor had, those from before included."""

    float32 = 0

    def _see(self, tensor: Tensor) -> None:
        super()._see(tensor)
        # others are DTensors, whose local parts come by too, and fakes without memory
        if type(tensor) in (Tensor, nn.Parameter) and tensor.dtype == torch.float32 and not tensor.is_meta:
            self.float32 = max(self.float32, tensor.numel())


def bytes_of(data: dict[str, Any], start: str, options: dict[str, Any], upcast: bool = False) -> dict[str, int]:
    """Shard a bfloat16 model and run it forward; elements and bytes on this rank. ``upcast`` makes it float32 first."""
    plan = read_plan(data)
    with torch.device(start):
        model = memory_workers.build().to(NARROW)
    full = sum(p.nbytes for p in model.parameters())
    if upcast:
        model.float()
    gc.collect()
    live = Widest([*model.parameters(), *model.buffers()])
    # ranks compare checksums first, in tensors that have nothing to do with it
    with live, mock.patch("autoshard.executor.execute.equalise"):
        autoshard.parallelize(model, plan, **options)
        in_call = live.float32
        if start == "meta":
            model.to_empty(device="cpu")
        gc.collect()
        answer = {"full": full, "peak": live.peak, "after": live.now, "in the call": in_call}
        rows = memory_workers.ids(1, slice(0, 1))
        with torch.no_grad():
            token_loss(model(rows), rows)
    shards = [p.to_local().numel() for p in model.parameters() if isinstance(p, DTensor)]
    return {**answer, "widest": live.float32, "largest shard": max(shards), "held": 4 * sum(shards)}


def survived(mesh: Mesh, training: Training = PLAIN) -> dict[str, Any]:
    """What was made on an optimizer before still drives it: groups, scheduler, scaler and hooks."""
    model, plan = build("decoder", mesh)
    vectors = [p for p in model.parameters() if p.dim() < 2 and p.requires_grad]
    matrices = [p for p in model.parameters() if p.dim() > 1 and p.requires_grad]
    split: list[dict[str, Any]] = [{"params": matrices}, {"params": vectors, "lr": 1e-3}]
    optimizer = torch.optim.AdamW(split, lr=1e-2, foreach=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda number: 0.5**number)
    scaler = autoshard.GradScaler("cpu", init_scale=4.0)
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    optimizer.register_state_dict_post_hook(lambda *_: calls.append("saved"))
    groups, shapes = list(optimizer.param_groups), [[tuple(p.shape) for p in one] for one in (matrices, vectors)]
    apply(model, plan, make_mesh(plan, "cpu"), [optimizer], training=training)
    named = {id(p) for p in model.parameters()}
    before = [p.detach().clone() for p in model.parameters()]
    rates = []
    for number in range(2):
        mine = batch("decoder", mesh, number).chunk(mesh.data)[dist.get_rank() // mesh.tp]
        scaler.scale(loss(model, mine)).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        optimizer.zero_grad()
        rates.append([group["lr"] for group in optimizer.param_groups])
    optimizer.state_dict()
    after = list(model.parameters())
    return {
        "calls": calls,
        "rates": rates,
        "same groups": all(one is other for one, other in zip(groups, optimizer.param_groups, strict=True)),
        "same shapes": [[tuple(p.shape) for p in group["params"]] for group in groups] == shapes,
        "the model's": all(id(p) in named for group in groups for p in group["params"]),
        "moved": sum(not torch.equal(_local(a), _local(b)) for a, b in zip(after, before, strict=True)),
    }


def _local(tensor: Tensor) -> Tensor:
    plain = tensor.detach()
    return plain.to_local() if isinstance(plain, DTensor) else plain
