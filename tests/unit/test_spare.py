"""A module that these inputs leave out is planned like one of its class that they do not."""

from __future__ import annotations

import dataclasses

import torch
from opaque_models import WIDTH, SometimesCrossed, TwoKinds
from torch import nn

import autoshard
from autoshard.passes.trace import Trace

X = torch.randn(2, 7, WIDTH, generator=torch.Generator().manual_seed(1))
BOTH = (X, torch.arange(14).reshape(2, 7) % 2 == 0)


def test_it_is_cut_and_right_where_it_is_called() -> None:
    torch.manual_seed(0)
    model = TwoKinds()
    made = autoshard.plan(model, world=2, tp=2, example_inputs=(X,))
    assert [made.parameters[f"second.{name}.weight"].tp_dim for name in ("gate", "up", "down")] == [0, 0, 1]
    assert any("not called in the trace" in text and "second" in text for text in made.assumptions)
    assert autoshard.verify(model, made, example_inputs=(X,)).ok
    assert autoshard.verify(model, made, example_inputs=BOTH).ok
    modules = {**made.modules, "second.down": dataclasses.replace(made.modules["second.down"], outputs={})}
    assert not autoshard.verify(model, dataclasses.replace(made, modules=modules), example_inputs=BOTH).ok


def test_it_is_no_unit_of_its_own() -> None:
    assert "second" in Trace((X,)).run(TwoKinds()).sometimes


def test_nothing_is_added_where_all_are_called_or_none_is_alike() -> None:
    assert not any(op.target == "autoshard.opaque" for op in Trace(BOTH).run(TwoKinds()).ops)
    model = TwoKinds()
    model.add_module("second", nn.Sequential(nn.Linear(WIDTH, WIDTH)))
    traced = Trace((X,)).run(model)
    assert not any(op.target == "autoshard.opaque" for op in traced.ops)
    assert [p.fqn for p in traced.parameters if p.value is None] == ["second.0.weight", "second.0.bias"]


def test_one_that_may_be_given_more_stays_whole() -> None:
    torch.manual_seed(0)
    model = SometimesCrossed()
    made = autoshard.plan(model, world=2, tp=2, example_inputs=(X,))
    assert [made.parameters[f"{name}.up.weight"].tp_dim for name in ("first", "second")] == [0, None]
    assert autoshard.verify(model, made, example_inputs=(X, X.flip(0))).ok
