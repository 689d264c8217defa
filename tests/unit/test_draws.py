"""Where a plan lets modules draw random numbers apart, and what the executor does at such a module."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import pytest
import torch
from drawing_models import WIDTH, Attention, Block, Dropping, example
from simulate import fake_world
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from autoshard.api import plan as make_plan
from autoshard.errors import InvalidArgument
from autoshard.executor.drawing import mixed
from autoshard.executor.execute import apply, make_mesh
from autoshard.plans import Plan


def planned(model: nn.Module, tp: int = 2) -> Plan:
    return make_plan(model, world=tp, tp=tp, example_inputs=(example(),))


def drawn(plan: Plan) -> dict[str, str | None]:
    return {fqn: module.draws for fqn, module in plan.module_plans() if module.draws}


@pytest.mark.parametrize("fused", [False, True])
def test_what_draws_for_shares_and_what_inside_it_does_not(fused: bool) -> None:
    plan = planned(Dropping(fused=fused))
    wanted = {"attention": "per_rank", "attention.last": "shared", "hidden": "per_rank"}
    assert drawn(plan) == {f"blocks.{i}.{name}": kind for i in range(2) for name, kind in wanted.items()}
    assert plan.modules["blocks.{0-1}.hidden"].why == "random numbers for each rank's share are the rank's own"
    assert not plan.warnings
    assert Plan.from_dict(plan.to_dict()) == plan
    assert "draws per rank" in str(plan)


@pytest.mark.parametrize("fused", [False, True])
def test_the_mode_of_planning_does_not_matter(fused: bool) -> None:
    state = torch.get_rng_state()
    model = Dropping(fused=fused, blocks=4).eval()
    assert drawn(planned(model)) == drawn(planned(copy.deepcopy(model).train()))
    assert len(drawn(planned(model))) == 12
    assert not model.training
    assert torch.equal(torch.get_rng_state(), state)


def test_attention_that_drops_nothing_in_training_either() -> None:
    model = Dropping(fused=True)
    for module in model.modules():
        if isinstance(module, Attention):
            module.p = 0.0
    assert set(drawn(planned(model.eval()))) == {f"blocks.{i}.hidden" for i in range(2)}


def test_training_that_does_not_run_is_no_reason_not_to_plan() -> None:
    model = Dropping(raises_in_training=True).eval()
    assert "blocks.0.hidden" in drawn(planned(model))


def test_nothing_where_nothing_is_cut_or_dropped() -> None:
    assert not drawn(planned(Dropping(), tp=1))
    model = Dropping()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    assert not {k for k in drawn(planned(model)) if "attention" not in k}


def test_code_that_draws_for_both_goes_on_with_the_common_numbers_and_is_named() -> None:
    plan = planned(Dropping(mixed=True))
    assert drawn(plan) == {f"blocks.{i}.hidden": "per_rank" for i in range(2)}
    (warning,) = plan.warnings
    assert "each tp rank drops the same places of its share (2 uses, first at drawing_models.py:" in warning


class InsideHeads(nn.Module):
    """Attention in which only the values are cut, inside each head: the dropped weights are whole."""

    def __init__(self) -> None:
        super().__init__()
        self.v, self.o = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q = x.unflatten(-1, (1, -1)).transpose(1, 2)
        v = self.v(x).unflatten(-1, (1, -1)).transpose(1, 2)
        y = nn.functional.scaled_dot_product_attention(q, q, v, dropout_p=0.5)
        return self.o(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def test_weights_that_are_whole_are_dropped_alike() -> None:
    plan = planned(InsideHeads())
    assert plan.parameters["v.weight"].tp_dim == 0
    assert not drawn(plan)


def test_seeds_of_ranks_differ() -> None:
    seeds = {mixed(number, rank) for number in range(50) for rank in range(8)}
    assert len({seed & 0xFFFFFFFF for seed in seeds}) == 400  # the CPU's generator takes 32 bits
    assert all(0 <= seed < 1 << 64 for seed in seeds)


def block_of(model: Dropping, index: int = 0) -> Block:
    block = model.blocks[index]
    assert isinstance(block, Block)
    return block


def state() -> Tensor:
    return torch.get_rng_state()


@pytest.fixture
def cut() -> Dropping:
    """A model as rank 0 of 2 has it; messages move nothing."""
    model = Dropping()
    plan = planned(model)
    apply(model, plan, make_mesh(plan, "cpu"))
    return model


@pytest.fixture(autouse=True)
def world() -> object:
    with fake_world(2):
        yield


def test_a_forward_that_draws_nothing_leaves_the_generator_alone(cut: Dropping) -> None:
    before = state()
    cut.eval()(example())
    assert torch.equal(state(), before)
    cut.train()(example())
    assert not torch.equal(state(), before)


def test_what_is_drawn_inside_leaves_the_common_stream_where_it_was(cut: Dropping) -> None:
    """However many numbers a rank draws for its share, the next common number is the same."""
    hidden = block_of(cut).hidden
    after = []
    for size in (3, 300):
        torch.manual_seed(1)
        hidden(torch.ones(size))
        after.append(torch.rand(()))
    assert after[0] == after[1]


def test_an_exception_leaves_the_common_stream(cut: Dropping) -> None:
    attention = block_of(cut).attention
    handle = attention.v.register_forward_hook(lambda *args: 1 / 0)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            attention(example())
    handle.remove()
    torch.manual_seed(1)
    first = attention(example())
    torch.manual_seed(1)
    assert torch.equal(attention(example()), first)


def gradients(model: nn.Module, recomputed: bool) -> list[Tensor]:
    torch.manual_seed(3)
    x = example().requires_grad_()
    y = checkpoint(model, x, use_reentrant=False) if recomputed else model(x)
    torch.rand(7)
    y.pow(2).sum().backward()
    assert x.grad is not None
    found = [x.grad, *(p.grad.to_local() for p in model.parameters() if isinstance(p.grad, DTensor))]
    assert len(found) == 1 + len(list(model.parameters()))
    model.zero_grad()
    return found


def test_recomputation_draws_the_same_again(cut: Dropping) -> None:
    block = block_of(cut)
    for got, wanted in zip(gradients(block, True), gradients(block, False), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


def test_recomputing_a_part_of_what_draws_apart_is_refused() -> None:
    model = Dropping()
    plan = planned(model)
    for index in range(2):
        block_of(model, index).attention.inner_checkpoint = True
    apply(model, plan, make_mesh(plan, "cpu"))
    answer = model(example().requires_grad_())
    with pytest.raises(InvalidArgument, match="random numbers cannot be drawn again as they were"):
        answer.sum().backward()


def test_copies_and_pickles_draw_too(cut: Dropping) -> None:
    outputs = []
    for each in (cut, copy.deepcopy(cut)):
        torch.manual_seed(3)
        outputs.append(each(example()))
    assert torch.equal(*outputs)
    hidden = block_of(cut).hidden
    made = pickle.loads(pickle.dumps(hidden))
    assert made.forward.kind == "per_rank"
    assert made.forward.module is made


def test_an_unknown_way_to_draw_is_refused() -> None:
    model = Dropping()
    plan = planned(model)
    name = "blocks.{0-1}.hidden"
    bad = dataclasses.replace(
        plan, modules={**plan.modules, name: dataclasses.replace(plan.modules[name], draws="twice")}
    )
    with pytest.raises(InvalidArgument, match="no way to draw random numbers is called 'twice'"):
        apply(model, bad, make_mesh(plan, "cpu"))


def test_compiled_blocks_draw_apart(cut: Dropping) -> None:
    block = block_of(cut)
    torch.manual_seed(3)
    wanted = block(example())
    block.compile(backend="eager")
    torch.manual_seed(3)
    torch.testing.assert_close(block(example()), wanted)
