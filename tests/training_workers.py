"""What the ranks run to hold each option of training against one process without it."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import models
import torch
import torch.distributed as dist
import torch.nn.functional as F
from executor_models import Config, Decoder, Report, decoder_plan, loss_of
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler
from torch.utils.flop_counter import FlopCounterMode
from workers import Twins

import autoshard
from autoshard import data_rank, data_world, set_gradient_sync, token_mean
from autoshard.errors import AutoshardError
from autoshard.executor.checks import MARK
from autoshard.executor.execute import apply, make_mesh
from autoshard.executor.training import Training
from autoshard.executor.whole import full_gradients
from autoshard.plans import Mesh

IGNORED = -100


def exact(mesh: Mesh, training: Training, layers: int = 2) -> tuple[Report, dict[str, Any]]:
    """Accumulate over 4 micro-batches, then train; names and keys stay."""
    torch.compiler.reset()
    counters.clear()
    twins = Twins(Config(layers=layers), mesh, training=training)
    assert list(twins.model.state_dict()) == list(twins.whole.state_dict())
    assert [n for n, _ in twins.model.named_parameters()] == [n for n, _ in twins.whole.named_parameters()]
    for micro in range(4):
        set_gradient_sync(twins.model, micro == 3)
        twins.step(divide=4)
    twins.compare_gradients("4 micro-batches")
    twins.zero()
    twins.train(2, foreach=True)
    if not training.compile:  # another length is another compilation
        with torch.no_grad():
            twins.forward_only(1, 5)
        twins.step()
    facts = {"fsdp": isinstance(twins.model, FSDPModule), "graphs": counters["stats"]["unique_graphs"]}
    return twins.report, facts


def copies(mesh: Mesh, mode: str) -> list[float]:
    """Errors of gradients of a copy and of an unpickled model, whose blocks recompute on their own."""
    twins = Twins(Config(), mesh, training=Training(checkpointing=mode))
    ids = twins.ids()
    made = [copy.deepcopy(twins.model), pickle.loads(pickle.dumps(twins.model))]
    loss_of(twins.model(ids), ids).backward()
    wanted = _present(full_gradients(twins.model))
    errors = []
    for model in made:
        loss_of(model(ids), ids).backward()
        got = _present(full_gradients(model))
        errors.append(max(float((a - b).abs().max()) for a, b in zip(got, wanted, strict=True)))
    return errors


def flops(mesh: Mesh) -> dict[str, tuple[int, int]]:
    """Floating-point operations of one step by mode, and how often the first block's gate was called."""
    found = {}
    for mode in ("none", "selective", "full"):
        twins = Twins(Config(layers=1), mesh, training=Training(checkpointing=mode))
        calls: list[int] = []
        twins.model.block(0).feed.gate.register_forward_pre_hook(lambda module, args, calls=calls: calls.append(1))
        ids = twins.mine(twins.ids())
        with FlopCounterMode(display=False) as counter:
            loss_of(twins.model(ids), ids).backward()
        found[mode] = (int(counter.get_total_flops()), len(calls))
    return found


def dropout(mesh: Mesh, mode: str) -> tuple[float, float]:
    """Errors of gradients where the recomputed part draws random numbers: the same ones, given the same seed."""
    gradients: dict[str, dict[str, Tensor | None]] = {}
    for one in ("none", mode):
        model = Decoder(Config())
        plan = decoder_plan(model, mesh)
        for index in range(2):
            model.block(index).feed.register_forward_hook(lambda module, args, out: F.dropout(out, 0.5))
        apply(model, plan, make_mesh(plan, "cpu"), training=Training(checkpointing=one))
        torch.manual_seed(3)
        ids = torch.arange(14).view(2, 7)
        loss_of(model(ids), ids).backward()
        torch.rand(5)
        gradients[one] = full_gradients(model)
    errors = [(a - b).abs().max().item() for a, b in zip(*map(_present, gradients.values()), strict=True)]
    return max(errors), float(torch.rand(()))


def _present(gradients: dict[str, Tensor | None]) -> list[Tensor]:
    return [g for g in gradients.values() if g is not None]


def mixed(mesh: Mesh, training: Training) -> dict[str, Any]:
    """bfloat16 against float32 in one process: 4 accumulated micro-batches, then the loss of 4 steps."""
    twins = Twins(Config(dtype=torch.float32, slopes=False), mesh, training=training)
    seen: set[torch.dtype] = set()
    kept: set[torch.dtype] = set()
    twins.model.block(0).feed.gate.register_forward_hook(lambda module, args, out: seen.add(out.dtype))
    for micro in range(4):
        set_gradient_sync(twins.model, micro == 3)
        twins.step(divide=4)
        if micro == 2:
            sums = twins.model.__dict__[MARK].sums
            kept = {total.dtype for unit in sums for _, total in unit._kept.values()}
    own, scaled = _norm_errors(twins)
    parameters = list(twins.model.parameters())
    held = {t.dtype for t in [*parameters, *(p.grad for p in parameters)] if t is not None}
    twins.zero()
    twins.report.losses = 0.0
    for _ in range(4):
        twins.step()
        for model in (twins.whole, twins.model):
            _descend(model)
    return {"own": own, "scaled": scaled, "loss": twins.report.losses, "seen": seen, "held": held, "kept": kept}


def _descend(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, foreach=True)
    optimizer.step()
    optimizer.zero_grad()


def _norm_errors(twins: Twins) -> tuple[float, float]:
    """Largest norms of gradient errors: relative to the gradient's own norm, and to the largest of all."""
    gradients = full_gradients(twins.model)
    wanted = {name: p.grad for name, p in twins.whole.named_parameters() if p.grad is not None}
    largest = max(float(g.norm()) for g in wanted.values())
    errors = {name: float((_some(gradients[name]) - g).norm()) for name, g in wanted.items()}
    return max(errors[n] / float(g.norm()) for n, g in wanted.items()), max(errors.values()) / largest


def _some(gradient: Tensor | None) -> Tensor:
    assert gradient is not None
    return gradient


def refused(mesh: Mesh) -> dict[str, str]:
    """What each option that cannot be had says; the model is as it was."""
    said: dict[str, str] = {}
    rank = dist.get_rank()

    def attempt(name: str, model: Decoder, training: Training, units: bool = True) -> None:
        plan = decoder_plan(model, mesh)
        if not units:
            plan = type(plan)(**{**plan.__dict__, "units": plan.units[-1:]})
        try:
            apply(model, plan, make_mesh(plan, "cpu"), training=training)
        except AutoshardError as error:
            said[name] = f"{type(error).__name__}: {error}"
        assert all(type(p) is nn.Parameter for p in model.parameters())
        assert all("forward" not in m.__dict__ for m in model.modules())

    attempt("narrow", Decoder(Config(dtype=torch.bfloat16)), Training(mixed_precision="bfloat16"))
    attempt("no blocks", Decoder(Config()), Training(checkpointing="full"), units=False)
    attempt("compile", Decoder(Config()), Training(compile=True), units=False)
    attempt("differ", Decoder(Config()), Training(checkpointing="full" if rank else "none"))
    return said


def labels_of(ids: Tensor, ignored: Callable[[int], Tensor]) -> Tensor:
    """Next tokens, some of them ignored; ``ignored(row)`` says which of a row's positions."""
    labels = torch.roll(ids, -1, dims=1)
    labels[:, -1] = IGNORED
    for row in range(ids.shape[0]):
        labels[row, ignored(row)] = IGNORED
    return labels


def _loss_sum(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")


def tokens(mesh: Mesh, empty: bool = False) -> dict[str, Any]:
    """The mean over tokens of ranks with unequal counts, once in one go and once accumulated."""
    twins = Twins(Config(), mesh)
    ids = twins.ids(per_rank=4)
    # the first rows lose most labels: the counts of data ranks differ widely, and with ``empty`` one has none
    kept = 0 if empty else 1
    labels = labels_of(ids, lambda row: torch.arange(kept, 7) if row < 4 else torch.arange(0, row % 3))
    mean = _loss_sum(twins.whole(ids), labels) / (labels != IGNORED).sum()
    mean.backward()
    mine, my_labels = twins.mine(ids), twins.mine(labels)
    count = int((my_labels != IGNORED).sum())
    loss = token_mean(_loss_sum(twins.model(mine), my_labels), count, twins.model)
    loss.backward()
    values = [float(loss - mean)]
    twins.compare_gradients("one go")
    twins.model.zero_grad()
    total = 0.0
    for micro in range(4):
        set_gradient_sync(twins.model, micro == 3)
        rows = slice(micro, micro + 1)
        part = token_mean(_loss_sum(twins.model(mine[rows]), my_labels[rows]), count, twins.model)
        part.backward()
        total += float(part)
    twins.compare_gradients("accumulated")
    values.append(total - float(mean))
    exact_ones = max(twins.report.gradients.values())
    twins.model.zero_grad()
    naive = _loss_sum(twins.model(mine), my_labels) / max(count, 1)
    naive.backward()
    twins.report.gradients.clear()
    twins.compare_gradients("naive")
    return {
        "value": max(map(abs, values)),
        "gradients": exact_ones,
        "naive": max(twins.report.gradients.values()),
        "count": count,
        "loss": float(loss),
    }


def no_tokens(mesh: Mesh) -> tuple[float, float]:
    """Loss and largest gradient where no rank has a token."""
    twins = Twins(Config(), mesh)
    ids = twins.mine(twins.ids())
    loss = token_mean(_loss_sum(twins.model(ids), torch.full_like(ids, IGNORED)), torch.tensor(0), twins.model)
    loss.backward()
    return float(loss), max(float(g.abs().max()) for g in _present(full_gradients(twins.model)))


def shares(mesh: Mesh) -> tuple[int, int, list[int]]:
    """This rank's data rank, the number of them, and the samples that torch's sampler gives it."""
    model = Decoder(Config())
    plan = decoder_plan(model, mesh)
    apply(model, plan, make_mesh(plan, "cpu"))
    data = TensorDataset(torch.arange(8))
    sampler: DistributedSampler[Any] = DistributedSampler(
        data, num_replicas=data_world(model), rank=data_rank(model), shuffle=True, seed=5
    )
    sampler.set_epoch(1)
    seen = [int(i) for (rows,) in DataLoader(data, batch_size=2, sampler=sampler) for i in rows]
    return data_rank(model), data_world(model), seen


def from_the_top(mesh: Mesh) -> dict[str, Any]:
    """Plan, apply and train through the public functions, with all options at once."""
    torch.manual_seed(0)
    model = models.Decoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    ids = torch.arange(28).view(4, 7) % 24
    autoshard.auto_parallelize(
        model,
        tp=mesh.tp,
        dp_shard=mesh.dp_shard,
        example_inputs=(ids,),
        optimizer=optimizer,
        mixed_precision="bfloat16",
        offload=True,
        checkpointing="selective",
        compile=True,
        compile_backend="aot_eager",
    )
    calls: list[int] = []
    model.blocks[1].register_forward_hook(lambda module, args, out: calls.append(1))
    losses = []
    for _ in range(6):
        labels = torch.roll(ids, -1, 1)
        loss = token_mean(_loss_sum(model(ids).float(), labels), labels.numel(), model)
        loss.backward()
        autoshard.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    wrapped = [type(block.forward).__name__ for block in model.blocks]
    return {"losses": losses, "wrapped": wrapped, "calls": len(calls)}


def policy() -> MixedPrecisionPolicy:
    """torch's own policy, with inputs cast at every unit."""
    return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
