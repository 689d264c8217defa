"""What the ranks run to see which random numbers each of them draws."""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from drawing_models import Dropping, example
from torch import Tensor

from autoshard import data_rank
from autoshard.api import parallelize
from autoshard.api import plan as make_plan
from autoshard.executor.whole import full_gradients
from autoshard.plans import Mesh, Plan

Masks = list[Tensor]
DROPOUT = F.dropout


def planned(mesh: Mesh, spoil: str | None = None) -> Plan:
    """The plan, or one in which a fact about random numbers is taken out."""
    plan = make_plan(
        Dropping(), mesh.world, tp=mesh.tp, dp_shard=mesh.dp_shard, dp_replicate=mesh.dp_replicate,
        example_inputs=(example(),),
    )  # fmt: skip
    modules = {
        pattern: dataclasses.replace(module, draws=None if module.draws == spoil else module.draws)
        for pattern, module in plan.modules.items()
    }
    return dataclasses.replace(plan, modules=modules)


class Recorder:
    """Stands in for ``F.dropout``: notes what it keeps."""

    def __init__(self) -> None:
        self.masks: Masks = []

    def __call__(self, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        mask = DROPOUT(torch.ones_like(x), p, training)
        self.masks.append(mask)
        return x * mask


class Player:
    """Stands in for ``F.dropout``: keeps what it is told."""

    def __init__(self, masks: Masks) -> None:
        self.masks = iter(masks)

    def __call__(self, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        return x * next(self.masks)


def whole(parts: list[Masks]) -> Masks:
    """What one process would have kept: the ranks' shares joined, and what is whole as all have it."""
    found = []
    shapes = iter(_whole_shapes())
    for ranks in zip(*parts, strict=True):
        shape = next(shapes)
        if ranks[0].shape == shape:
            assert all(torch.equal(rank, ranks[0]) for rank in ranks), "a whole value is dropped in different places"
            found.append(ranks[0])
        else:
            dim = next(i for i, size in enumerate(shape) if ranks[0].shape[i] != size)
            found.append(torch.cat(ranks, dim))
    return found


def _whole_shapes() -> list[torch.Size]:
    recorder = Recorder()
    with mock.patch.object(F, "dropout", recorder), torch.random.fork_rng(devices=[]):
        Dropping()(example())
    return [mask.shape for mask in recorder.masks]


def drawn(mesh: Mesh, spoil: str | None = None, steps: int = 1) -> tuple[int, list[Masks]]:
    """The data rank, and what each of the training forwards keeps; every rank has seeded alike before."""
    torch.manual_seed(11)
    model = parallelize(Dropping(), planned(mesh, spoil))
    found = []
    for _ in range(steps):
        recorder = Recorder()
        with mock.patch.object(F, "dropout", recorder):
            model(example())
        found.append(recorder.masks)
    return data_rank(model), found


def seeded_apart(mesh: Mesh) -> list[float]:
    """Numbers drawn after each rank has drawn as many as its rank before sharding."""
    torch.manual_seed(11)
    torch.rand(dist.get_rank())
    parallelize(Dropping(), planned(mesh))
    return torch.rand(3).tolist()


def trained(mesh: Mesh, checkpointing: str) -> dict[str, float]:
    """Errors of outputs and gradients against one process that drops the same places."""
    model = parallelize(Dropping(), planned(mesh), checkpointing=checkpointing)
    recorder = Recorder()
    torch.manual_seed(5)
    with mock.patch.object(F, "dropout", recorder):
        first = model(example())
    torch.manual_seed(5)
    x = example()
    got = model(x)  # unpatched: torch's own dropout, drawn as the recorder did
    got.pow(2).sum().backward()
    parts: list[Any] = [None] * mesh.tp
    dist.all_gather_object(parts, recorder.masks)
    reference = Dropping()
    with mock.patch.object(F, "dropout", Player(whole(parts))):
        wanted = reference(x)
    wanted.pow(2).sum().backward()
    errors = {"output": float((got - wanted).abs().max()), "again": float((got - first).abs().max())}
    gradients = full_gradients(model)
    for name, parameter in reference.named_parameters():
        gradient = gradients[name]
        assert gradient is not None and parameter.grad is not None
        errors[name] = float((gradient - parameter.grad).abs().max())
    return errors
