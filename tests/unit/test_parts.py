"""Parameters cut in parts or read in slices, in one process: the order, the refusals, optimizers, and ``verify``."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from parts_models import HIDDEN, Model, plan_of, seen
from simulate import fake_world
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, debug
from torch.testing._internal.distributed.fake_pg import FakeStore

import autoshard
from autoshard._torch import local_part, spec_of
from autoshard.errors import AutoshardError, OptimizerError
from autoshard.executor.execute import apply, make_mesh
from autoshard.executor.inparts import InParts, mark
from autoshard.executor.parts import Order
from autoshard.optim.made import make_all
from autoshard.optim.table import REFUSED, TABLE, WAYS, WORKS
from autoshard.plans import GradSum, Mesh, Plan

TWO = Mesh(1, 1, 2)
PARTS = ((0, 6), (6, 2), (8, 6))


def test_the_two_orders_undo_each_other() -> None:
    order, whole = Order(1, PARTS, 2), torch.arange(28).view(2, 14)
    by_rank = order.by_rank(whole)
    assert by_rank[0].tolist() == [0, 1, 2, 6, 8, 9, 10, 3, 4, 5, 7, 11, 12, 13]
    assert torch.equal(order.canonical(by_rank), whole)
    assert Order(1, PARTS, 1).by_rank(whole).tolist() == whole.tolist()


@pytest.mark.parametrize("sizes", [PARTS, ((0, 4), (4, 4)), ((0, 2), (2, 2))], ids=str)
@pytest.mark.parametrize("data", [2, 3])
def test_the_pieces_say_where_fsdp_has_put_the_rows(sizes: tuple[tuple[int, int], ...], data: int) -> None:
    order, total = Order(0, sizes, 2), sum(length for _, length in sizes)
    whole = torch.arange(float(total))
    seen_rows: list[float] = []
    for rank in range(2 * data):
        with _rank_of(rank, 2 * data):
            seen_rows += _rows_of(order, whole, data, rank)
    assert sorted(seen_rows) == whole.tolist()


@contextmanager
def _rank_of(rank: int, world: int) -> Iterator[None]:
    """Be one rank of a group that moves nothing."""
    # its caches hand out specs with any equal mesh: none may survive from another rank
    debug._clear_sharding_prop_cache()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()
        debug._clear_sharding_prop_cache()


def _rows_of(order: Order, whole: Tensor, data: int, rank: int) -> list[float]:
    """Return the rows that the pieces of one rank name, after comparing them with what it holds."""
    mesh = init_device_mesh("cpu", (1, data, 2), mesh_dim_names=("dp_replicate", "dp_shard", "tp"))
    module = nn.Module()
    local = order.by_rank(whole).chunk(2)[rank % 2]
    held = DTensor.from_local(local.clone(), mesh["tp"], [Shard(0)], run_check=False)
    module.weight = nn.Parameter(held)
    fully_shard(module, mesh=mesh["dp_replicate", "dp_shard"])
    weight: Any = module.weight
    mark(weight, order)
    mine = local_part(weight)
    found: list[float] = []
    pieces = order.pieces(spec_of(weight))
    assert sum(piece.length for piece in pieces) == len(mine)
    for piece in pieces:
        rows = whole[piece.canonical : piece.canonical + piece.length]
        assert torch.equal(mine[piece.local : piece.local + piece.length], rows)
        found += rows.tolist()
    assert [tuple(chunk.sizes) for chunk in weight.__create_chunk_list__()] == [(p.length,) for p in pieces]
    return found


def _in_parts(local: Tensor) -> tuple[nn.Parameter, Order]:
    order = Order(0, ((0, 2), (2, 4)), 2)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    parameter = nn.Parameter(DTensor.from_local(local.clone(), mesh, [Shard(0)], run_check=False))
    mark(parameter, order)  # type: ignore[arg-type]
    return parameter, order


@pytest.mark.parametrize("support", TABLE, ids=lambda support: support.kind.__name__)
def test_optimizers_compute_on_parts_as_on_plain_rows_or_refuse(support: Any) -> None:
    values, gradients = torch.randn(3, 4), [torch.randn(3, 4) for _ in range(2)]
    ways = [way for way in WAYS if support.verdict(way) == WORKS and support.in_parts == WORKS]
    with fake_world(2):
        for way in ways:
            plain = nn.Parameter(values.clone())
            parameter, order = _in_parts(values)
            ours, theirs = (support.kind([p], lr=0.1, **support.options(way)) for p in (parameter, plain))
            for gradient in gradients:
                plain.grad = gradient.clone()
                parameter.grad = mark(DTensor.from_local(gradient.clone(), parameter.device_mesh, [Shard(0)]), order)  # type: ignore[attr-defined]
                ours.step()
                theirs.step()
            assert isinstance(parameter, InParts)
            assert torch.equal(local_part(parameter), plain.detach()), way
            for key, value in ours.state[parameter].items():
                assert isinstance(value, InParts) or not isinstance(value, DTensor) or value.dim() == 0, key
        if support.in_parts == REFUSED:
            parameter, order = _in_parts(values)
            parameter.grad = parameter.detach().clone()
            with pytest.raises(AutoshardError, match="cut in parts"):
                support.kind([parameter], lr=0.1).step(lambda: 0.0)


@pytest.mark.parametrize("kind", [torch.optim.Muon, torch.optim.LBFGS])
def test_optimizers_that_mix_rows_are_refused_before_anything_changes(kind: Any) -> None:
    def matrices(model: nn.Module, without: str = "nothing") -> list[tuple[str, nn.Parameter]]:
        return [(n, p) for n, p in model.named_parameters() if p.dim() == 2 and without not in n]

    model, plan = _model_and_plan()
    assert plan.parameters["fused.qkv.weight"].tp_parts is not None
    optimizer, before = kind(matrices(model)), [id(parameter) for parameter in model.parameters()]
    with fake_world(2):
        mesh = make_mesh(plan, "cpu")
        with pytest.raises(OptimizerError, match=f"{kind.__name__} does not work on parameters that tp cuts in parts"):
            apply(model, plan, mesh, [optimizer])
        assert [id(parameter) for parameter in model.parameters()] == before
        in_parts = [name for name, one in plan.parameters.items() if one.tp_parts is not None]
        others = [(name, p) for name, p in matrices(model) if name not in in_parts]
        apply(model, plan, mesh, [kind(others)])
        with pytest.raises(OptimizerError, match=r"give those to torch\.optim\.AdamW"):
            make_all(model, [lambda named: kind([(n, p) for n, p in named if p.dim() == 2])], sharded=True)
        make_all(model, [lambda named: kind([(n, p) for n, p in named if p.dim() == 2 and n not in in_parts])], True)


def _model_and_plan(**changes: dict[str, Any]) -> tuple[Model, Plan]:
    model = Model()
    return model, plan_of(model, TWO, **changes)


def test_refusals() -> None:
    slices = ((0, 16, 2), (16, 4, 1), (20, 4, 1))
    cases: dict[str, dict[str, Any]] = {
        "the parts do not make up dim 0": {"fused__qkv__bias": {"tp_parts": ((0, 16), (16, 8))}},
        "in pieces that 2 divides": {"fused__qkv__bias": {"tp_parts": ((0, 15), (15, 17))}},
        "the slices do not make up dim 0": {"mixed__qkv__bias": {"slices": slices[:2]}},
        "the slices do not make up dim 1": {"mixed__qkv__weight": {"slice_dim": 1}},
        "16 elements at 0 cannot be shared in 3 equal ways by 2 ranks\n   at: mixed.qkv.bias\n"
        "  got: 3 ways; allowed: 1, 2": {"mixed__qkv__bias": {"slices": ((0, 16, 3), *slices[1:])}},
        "cannot be shared in 4 equal ways by 2 ranks": {"mixed__qkv__bias": {"slices": ((0, 16, 4), *slices[1:])}},
        "cannot be shared in 0 equal ways": {"mixed__qkv__bias": {"slices": ((0, 16, 0), *slices[1:])}},
        "has a part of its gradient on each rank": {"mixed__qkv__bias": {"grad_sum": None}},
        "summing part of a gradient": {"mixed__qkv__bias": {"grad_sum": GradSum(2, ((0, 16),))}},
        "is held whole, and names slices": {"mixed__qkv__bias": {"slices": None}},
        "has its own gradient and value on each rank": {"mixed__qkv__bias": {"tp_dim": 0}},
        "slices are given of a parameter that is not": {"mixed__qkv__bias": {"read": "local"}},
        "a buffer is read as it is held": {
            "mixed__slopes": {**seen(((0, 8, 2),), 2), "tp_dim": None, "tp_parts": None, "grad_sum": None}
        },
        "cuts one parameter in two ways": {"again__weight": {"tp_parts": ((0, 24),)}},
    }
    with fake_world(2):
        mesh = make_mesh(_model_and_plan()[1], "cpu")
        for said, changes in cases.items():
            model, plan = _model_and_plan(**changes)
            with pytest.raises(AutoshardError) as caught:
                apply(model, plan, mesh)
            assert said in str(caught.value), caught.value
            assert not any(isinstance(p, DTensor) for p in model.parameters())


def test_a_frozen_parameter_read_in_slices_needs_no_sum() -> None:
    model, plan = _model_and_plan(mixed__scale={"grad_sum": None, "trainable": False})
    model.mixed.scale.requires_grad_(False)
    with fake_world(2):
        apply(model, plan, make_mesh(plan, "cpu"))
        assert model.mixed.scale.shape == (2,)


def test_a_plan_of_before_there_were_slices_loads() -> None:
    plan = _model_and_plan()[1]
    data = plan.to_dict()
    assert Plan.from_dict(copy.deepcopy(data)) == plan
    for tensor in data["parameters"].values():
        del tensor["slices"], tensor["slice_dim"]
    old = Plan.from_dict(data)
    assert old.parameters["mixed.scale"] == dataclasses.replace(
        plan.parameters["mixed.scale"], slices=None, slice_dim=None
    )


@pytest.mark.parametrize("mesh", [TWO, Mesh(1, 1, 4)], ids=str)
def test_verify_proves_it(mesh: Mesh) -> None:
    model = Model()
    proof = autoshard.verify(model, plan_of(model, mesh), example_inputs=(torch.randn(2, 5, HIDDEN).double(),))
    assert proof, proof


@pytest.mark.parametrize(
    "change",
    [
        {"fused__qkv__weight": {"tp_parts": None}},
        {"experts__gate_up": {"tp_parts": None}},
        {"mixed__qkv__bias": {"slices": ((0, 8, 1), (8, 16, 2))}},
    ],
    ids=str,
)
def test_verify_sees_a_wrong_one(change: dict[str, dict[str, Any]]) -> None:
    model, plan = _model_and_plan(**change)
    assert not autoshard.verify(model, plan, example_inputs=(torch.randn(2, 5, HIDDEN).double(),))
