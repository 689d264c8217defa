"""What only hand plans ask of the executor: cuts in parts, and conversions of a part of a value."""

from __future__ import annotations

import pytest
import torch
from simulate import on_rank, per_rank, same_on_all, seeded, simulated
from torch import Tensor, nn

from autoshard.errors import InvalidArgument
from autoshard.executor.collectives import Axis, Conversion, take_parts
from autoshard.executor.execute import apply, make_mesh
from autoshard.hand.plan import PlanBuilder
from autoshard.hand.reader import from_hand
from autoshard.hand.rules import Rules
from autoshard.plans import AXES
from autoshard.proving.double import grouped_mm
from autoshard.proving.subject import Cut


def fused() -> nn.Module:
    class Fused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_up = nn.Linear(4, 12, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.gate_up(x)
            return y

    torch.manual_seed(0)
    return Fused().double()


def test_a_span_is_summed_and_the_rest_is_not() -> None:
    plan = from_hand(fused(), {"gate_up": "colwise"}, 2).plan
    value, weights = seeded(3, 6), seeded(3, 6, seed=1)
    with simulated(2):
        axis = Axis(make_mesh(plan, "cpu")[AXES[2]])
        value = per_rank(value, value).requires_grad_()
        (Conversion.parse("R->V[4:6]")(value, axis) * weights).sum().backward()
        gradient = same_on_all(value.grad)
        assert torch.equal(gradient[:, :4], weights[:, :4])
        assert torch.equal(gradient[:, 4:], 2 * weights[:, 4:])
        with pytest.raises(InvalidArgument, match="elements 4 to 9"):
            Conversion.parse("R->V[4:9]")(value, axis)


def test_a_value_with_a_partial_gradient_becomes_a_summand() -> None:
    plan = from_hand(fused(), {"gate_up": "colwise"}, 2).plan
    value = seeded(3, 6)
    with simulated(2):
        axis = Axis(make_mesh(plan, "cpu")[AXES[2]])
        value = per_rank(value, value).requires_grad_()
        whole = Conversion.parse("P->R")(Conversion.parse("V->P")(Conversion.parse("R->V")(value, axis), axis), axis)
        assert torch.equal(same_on_all(whole), same_on_all(value.detach()))
        whole.sum().backward()
        assert torch.equal(same_on_all(value.grad), torch.ones(3, 6, dtype=torch.float64))


def test_each_rank_holds_its_slice_of_each_part() -> None:
    model = fused()
    weight = model.get_parameter("gate_up.weight").detach().clone()
    plan = from_hand(model, {"gate_up": "packed_colwise"}, 2).plan
    assert plan.parameters["gate_up.weight"].tp_parts == ((0, 6), (6, 6))
    with simulated(2):
        apply(model, plan, make_mesh(plan, "cpu"))
        held = model.get_submodule("gate_up").weight
        assert isinstance(held, Tensor)
        held = held.detach()
        shares = Cut(0, ((0, 6), (6, 6))).shares(weight, 2)
        for rank, rows in enumerate(([0, 1, 2, 6, 7, 8], [3, 4, 5, 9, 10, 11])):
            assert torch.equal(on_rank(held, rank), weight[rows])
            assert torch.equal(shares[rank], weight[rows])


def test_parts_must_make_up_the_dim() -> None:
    value = torch.arange(12.0)
    assert take_parts(value, torch.tensor([1]), 2, 0, ((0, 4), (4, 8))).tolist() == [2, 3, 8, 9, 10, 11]
    assert [t.tolist() for t in Cut(0).shares(torch.arange(3), 4)] == [[0], [1], [2], []]


def test_a_rule_for_a_parameter_beats_its_modules() -> None:
    rules = Rules({"gate_up": "colwise", "gate_up.weight": "rowwise"})
    made = PlanBuilder(fused(), rules, 2).build()
    assert made.parameters["gate_up.weight"].tp_dim == 1
    assert made.modules["gate_up"].inputs == {"input": "R->V"}
    assert rules.idle == []


def test_a_star_is_one_number() -> None:
    rules = Rules({"layers.*.up": "colwise", "layers.1.up": "rowwise"})
    assert rules.of(["layers.0.up"]) == "layers.*.up"
    assert rules.of(["layers.1.up"]) == "layers.1.up"
    assert rules.of(["layers.x.up"]) is None
    assert rules.of(["layers.0.inner.up"]) is None


def test_grouped_products_are_their_definition() -> None:
    rows, weights = seeded(5, 3).requires_grad_(), seeded(2, 3, 4, seed=1).requires_grad_()
    made = grouped_mm(rows, weights, offs=torch.tensor([2, 4]))
    assert torch.allclose(made[:2], rows[:2] @ weights[0])
    assert torch.allclose(made[2:4], rows[2:4] @ weights[1])
    assert not made[4].any()
