"""What modules return while it is not whole and nobody takes, and what becomes of it where the model hands it out."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from simulate import same_on_all, simulated
from torch import Tensor, nn

from autoshard.api import plan as make_plan
from autoshard.errors import InvalidArgument
from autoshard.executor.execute import apply, make_mesh
from autoshard.executor.whole import full_gradients
from autoshard.plans import Plan

X = torch.linspace(-1, 1, 96, dtype=torch.float64).view(2, 6, 8)


class Attention(nn.Module):
    """Returns its weights beside, by head."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (p(x).unflatten(-1, (-1, 2)).transpose(1, 2) for p in (self.q, self.k, self.v))
        weights = (q @ k.transpose(-1, -2)).softmax(-1)
        y: Tensor = self.o((weights @ v).transpose(1, 2).flatten(2))
        # seen from head to head, a rank's share of the last is no slice
        return y, weights, weights.transpose(1, 2).unflatten(1, (2, 3)).transpose(2, 3).flatten(1, 2)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Attention() for _ in range(2))
        self.double()

    def forward(self, x: Tensor, wanted: bool = False, others: bool = False) -> Any:
        found = []
        for layer in self.layers:
            y, weights, more = layer(x)
            x = x + y
            found.append({"weights": weights, **({"more": more} if others else {})})
        return (x, tuple(found)) if wanted else x


def planned() -> Plan:
    return make_plan(Model(), world=2, tp=2, example_inputs=(X,))


def test_the_plan_says_how_they_become_whole() -> None:
    plan = planned()
    module = plan.modules["layers.{0-1}"]
    assert module.returns == {"1": "S(-3)->R", "2": "refuse"}
    assert Plan.from_dict(plan.to_dict()) == plan
    assert "out.1: S(-3)->R if the model returns it" in " ".join(str(plan).split())
    assert not any(
        m.returns for m in make_plan(Model(), world=2, tp=1, dp_shard=2, example_inputs=(X,)).modules.values()
    )


def sharded(plan: Plan) -> Model:
    model = Model()
    apply(model, plan, make_mesh(plan, "cpu"))
    return model


def test_they_are_whole_where_the_model_returns_them_and_take_gradients() -> None:
    whole = Model()
    wanted, weights = whole(X, wanted=True)
    (wanted.sum() + sum(w["weights"].pow(2).sum() for w in weights)).backward()
    with simulated(2):
        model = sharded(planned())
        got, shares = model(X, wanted=True)
        assert [tuple(one["weights"].shape) for one in shares] == [(2, 4, 6, 6)] * 2
        for one, other in zip(shares, weights, strict=True):
            torch.testing.assert_close(same_on_all(one["weights"].detach()), other["weights"].detach())
        (got.sum() + sum(w["weights"].pow(2).sum() for w in shares)).backward()
        for name, gradient in full_gradients(model).items():
            torch.testing.assert_close(same_on_all(gradient), whole.get_parameter(name).grad, rtol=1e-9, atol=1e-12)


def test_what_cannot_be_made_whole_is_refused() -> None:
    with simulated(2):
        model = sharded(planned())
        model(X)
        with pytest.raises(InvalidArgument, match=r"a rank's share that cannot be made whole: 1\.0\.more"):
            model(X, wanted=True, others=True)


def test_without_the_fact_the_shares_leak() -> None:
    plan = planned()
    modules = {fqn: dataclasses.replace(module, returns={}) for fqn, module in plan.modules.items()}
    with simulated(2):
        _, shares = sharded(dataclasses.replace(plan, modules=modules))(X, wanted=True)
        assert shares[0]["weights"].shape[1] == 2


def test_nothing_is_kept_and_copies_convert_too() -> None:
    with simulated(2):
        model = sharded(planned())
        for one in (model, copy.deepcopy(model)):
            assert one(X, wanted=True)[1][0]["weights"].shape[1] == 4
            hooks = [h.__self__ for h in one._forward_hooks.values() if hasattr(h, "__self__")]
            (returned,) = {id(h): h for h in hooks if hasattr(h, "_noted")}.values()
            assert not returned._noted
            one(X)
            assert not returned._noted


def test_an_unknown_conversion_is_refused() -> None:
    plan = planned()
    name = "layers.{0-1}"
    bad = dataclasses.replace(
        plan, modules={**plan.modules, name: dataclasses.replace(plan.modules[name], returns={"1": "R->Q"})}
    )
    with simulated(2), pytest.raises(InvalidArgument, match="no conversion is called 'R->Q'"):
        sharded(bad)
