"""A module that is registered under two names is one module: it converts as the name says under which it was traced."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoshard
from autoshard.errors import InvalidArgument
from autoshard.plans import ModulePlan, Plan

X = (torch.randn(2, 5, 24, generator=torch.Generator().manual_seed(0)),)


class Lone(nn.Module):
    """One matrix in two containers, whose result is gathered."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        shared = nn.Linear(24, 8)
        self.one, self.two = nn.Sequential(shared, nn.Softmax(-1)), nn.Sequential(shared, nn.Softmax(-1))

    def forward(self, x: Tensor) -> Any:
        return self.one(x), self.two(x.flip(1))


class Towers(nn.Module):
    """One block is the body of two towers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        body = nn.Sequential(nn.LayerNorm(24), nn.Linear(24, 48), nn.GELU(), nn.Linear(48, 24))
        self.left, self.right = nn.ModuleDict({"body": body}), nn.ModuleDict({"body": body})
        self.norm = nn.LayerNorm(24)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x + self.left["body"](x))
        return self.norm(x + self.right["body"](x))  # type: ignore[no-any-return]


CASES = {"lone": (Lone, "one.0", "two.0"), "towers": (Towers, "left.body.3", "right.body.3")}


def planned(name: str) -> tuple[nn.Module, Plan]:
    model = CASES[name][0]()
    return model, autoshard.plan(model, world=2, tp=2, example_inputs=X)


def with_modules(plan: Plan, **changed: ModulePlan | None) -> Plan:
    modules = {**plan.modules, **changed}
    return dataclasses.replace(plan, modules={fqn: one for fqn, one in modules.items() if one is not None})


@pytest.mark.parametrize("name", CASES)
def test_a_shared_module_converts_for_both_of_its_names(name: str) -> None:
    model, plan = planned(name)
    first, second = CASES[name][1:]
    assert plan.modules[first].outputs
    assert plan.parameters[f"{second}.weight"].tied_to == f"{first}.weight"
    assert autoshard.verify(model, plan, example_inputs=X).ok
    spoiled = with_modules(plan, **{first: dataclasses.replace(plan.modules[first], outputs={})})
    assert not autoshard.verify(model, spoiled, example_inputs=X).ok


@pytest.mark.parametrize("name", CASES)
def test_either_name_may_say_what_happens(name: str) -> None:
    model, plan = planned(name)
    first, second = CASES[name][1:]
    moved = with_modules(plan, **{first: None, second: plan.modules[first]})
    assert autoshard.verify(model, moved, example_inputs=X).ok


def test_two_names_that_say_different_things_are_refused() -> None:
    model, plan = planned("towers")
    other = dataclasses.replace(plan.modules["left.body.3"], outputs={"": "S(-1)->R"})
    with pytest.raises(InvalidArgument, match=r"another name of left\.body\.3"):
        autoshard.verify(model, with_modules(plan, **{"right.body.3": other}), example_inputs=X)
