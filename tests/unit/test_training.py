"""Training options and helpers without a process group."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import pytest
import torch
from models import build
from simulate import fake_world
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

import autoshard
from autoshard.diff import differences
from autoshard.errors import InvalidArgument
from autoshard.executor.checks import MARK
from autoshard.executor.recompute import Recomputed, recompute
from autoshard.executor.training import Training, blocks
from autoshard.plans import Coverage, Mesh, Plan, Unit


class Scaled(nn.Module):
    """Its arguments have the names of checkpoint's own."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.runs = 0

    def forward(self, x: Tensor, *, debug: float = 1.0, context_fn: Tensor | None = None) -> Tensor:
        self.runs += 1
        y: Tensor = self.down(torch.tanh(self.up(x))) * debug
        return y if context_fn is None else y + context_fn


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_a_module_recomputes_in_place(mode: str) -> None:
    torch.manual_seed(0)
    module, names = Scaled(), list(Scaled().state_dict())
    signature = inspect.signature(module.forward)
    x, shift = torch.randn(2, 4), torch.randn(4, requires_grad=True)
    gradients = []
    for _ in range(2):
        module(x, debug=2.0, context_fn=shift).pow(2).sum().backward()
        gradients.append([p.grad for p in (*module.parameters(), shift) if p.grad is not None])
        module.zero_grad()
        shift.grad = None
        if len(gradients) == 1:
            module.runs = 0
            recompute(module, mode)
    assert module.runs == 2
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    assert list(module.state_dict()) == names
    assert inspect.signature(module.forward) == signature
    with torch.no_grad():
        module(x)
    assert module.runs == 3


def test_a_forward_of_the_instances_own_is_kept() -> None:
    module = Scaled()
    module.__dict__["forward"] = lambda x: x * 3
    recompute(module, "full")
    assert module(torch.ones(2)).tolist() == [3.0, 3.0]


def test_blocks_are_the_outermost_units_with_modules_inside() -> None:
    model = nn.Sequential(nn.Embedding(4, 4), nn.Sequential(Scaled(), Scaled()), Scaled(), nn.Linear(4, 4))
    units = tuple(Unit(name, 0, 0) for name in ("1.0", "0", "1", "2", "3", ""))
    plan = Plan(Mesh(), {}, {}, {}, units, {}, (), Coverage(0.0, 0.0))
    assert blocks(model, plan) == [model[1], model[2]]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mixed_precision": "float8"}, "no mixed precision is called 'float8'"),
        ({"checkpointing": "some"}, "allowed: none, selective, full"),
        ({"compile_backend": "inductor"}, "pass compile=True as well"),
        ({"tp_reduce_dtype": torch.int32}, "got: torch.int32; allowed: None, torch.bfloat16, torch.float16"),
        ({"tp_reduce_dtype": "float32"}, "no sum over tp runs in 'float32'"),
    ],
)
def test_an_option_that_does_not_exist(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        Training(**options)
    with pytest.raises(InvalidArgument, match=words):
        autoshard.parallelize(nn.Linear(2, 2), {}, **options)


def test_a_dtype_of_sums_is_in_the_plan_and_followed() -> None:
    model, ids = build("decoder", torch.bfloat16), (torch.zeros(2, 6, dtype=torch.long),)
    plain, wide = (
        autoshard.plan(build("decoder", torch.bfloat16), 2, tp=2, example_inputs=ids, tp_reduce_dtype=dtype)
        for dtype in (None, "float32")
    )
    assert (plain.workload.tp_reduced, wide.workload.tp_reduced) == (None, "float32")
    assert Plan.from_dict(wide.to_dict()) == wide
    old = plain.to_dict()
    del old["workload"]["tp_reduced"]  # a plan of before there was one
    assert Plan.from_dict(old) == plain
    assert "sums over tp in float32" in str(wide) and "sums over tp" not in str(plain)
    assert "sums over tp in float32" in str(differences(plain, wide))
    spoiled = replace(wide, workload=replace(wide.workload, tp_reduced="float8"))
    with fake_world(2):
        with pytest.raises(InvalidArgument, match="no sum over tp runs in 'float8'"):
            autoshard.parallelize(model, spoiled)
        assert autoshard.parallelize(model, wide).__dict__[MARK].training.tp_reduce_dtype == torch.float32
        other = autoshard.parallelize(build("decoder", torch.bfloat16), wide, tp_reduce_dtype=torch.float64)
        assert other.__dict__[MARK].training.tp_reduce_dtype == torch.float64
    with pytest.raises(InvalidArgument, match="no tp_reduce_dtype is called 'int32'"):
        autoshard.plan(model, 2, tp_reduce_dtype="int32")


@pytest.mark.parametrize("helper", [autoshard.data_rank, autoshard.data_world])
def test_there_are_no_data_axes_before_sharding(helper: Any) -> None:
    with pytest.raises(InvalidArgument, match="not parallelized"):
        helper(nn.Linear(2, 2))
    with pytest.raises(InvalidArgument, match="not parallelized"):
        autoshard.token_mean(torch.tensor(1.0), 1, nn.Linear(2, 2))


def test_clipping_by_value_of_plain_gradients() -> None:
    parameters = [nn.Parameter(torch.zeros(3)) for _ in range(2)]
    parameters[0].grad = torch.tensor([-2.0, 0.5, 2.0])
    autoshard.clip_grad_value_(parameters, 1.0)
    autoshard.clip_grad_value_(parameters[0], 1.0)
    assert parameters[0].grad.tolist() == [-1.0, 0.5, 1.0]
    assert parameters[1].grad is None


def test_what_the_plan_chose_is_applied() -> None:
    ids = torch.zeros(2, 7, dtype=torch.long)
    model = build("decoder", torch.float32)
    plan = replace(autoshard.plan(model, world=4, tp=2, example_inputs=(ids,)), checkpointing="full", reshard=False)
    with fake_world(4):
        autoshard.parallelize(model, Plan.from_dict(plan.to_dict()))
        assert all(
            isinstance(block.__dict__["forward"], Recomputed) for block in model.get_submodule("blocks").children()
        )
        model(ids)
        block = model.get_submodule("blocks.0")
        assert isinstance(block, FSDPModule)
        # it was not freed: its parameters are those of a tp rank, not of a data rank as well
        held = [p for p in block.parameters() if isinstance(p, DTensor)]
        assert {p.device_mesh.mesh_dim_names for p in held} == {("tp",)}
