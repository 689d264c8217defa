"""Sizes in the user's code that come from attributes: set where that is enough, left whole with the line where not."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoshard
from autoshard.plans import Plan

X = (torch.randn(2, 7, 32),)
HEADS = 4


class Sized(nn.Module):
    """Attention whose sizes are attributes, in one of the spellings people write."""

    def __init__(self, spelling: str) -> None:
        super().__init__()
        self.heads, self.head_dim, self.inner = 4, 8, 32
        self.q, self.k, self.v, self.o = (nn.Linear(32, 32) for _ in range(4))
        self.norm = nn.LayerNorm(32)
        self.spelling = spelling

    def split(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        if self.spelling == "minus one on the sequence":
            return x.view(b, -1, self.heads, self.head_dim).transpose(1, 2)
        if self.spelling == "unflatten":
            return x.unflatten(-1, (self.heads, self.head_dim)).transpose(1, 2)  # type: ignore[no-any-return]
        if self.spelling == "quotient":
            return x.reshape(b, s, self.heads, self.inner // self.heads).transpose(1, 2)
        if self.spelling == "global":
            return x.view(b, s, HEADS, 8).transpose(1, 2)
        return x.view(b, s, self.heads, self.head_dim).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        q, k, v = (self.split(p(x)) for p in (self.q, self.k, self.v))
        scores = q @ k.transpose(-1, -2)
        if self.spelling == "value":
            scores = scores / math.sqrt(self.heads)
        if self.spelling == "compared" and scores.size() != (x.shape[0], self.heads, x.shape[1], x.shape[1]):
            raise ValueError("scores of another size")
        y = (scores.softmax(-1) @ v).transpose(1, 2)
        y = y.reshape(x.shape[0], -1, self.inner) if "minus" in self.spelling else y.flatten(2)
        return self.norm(x + self.o(y))  # type: ignore[no-any-return]


def made(spelling: str) -> Plan:
    return autoshard.plan(Sized(spelling), world=2, tp=2, example_inputs=X)


WORKS = {
    "plain": {"heads": 2},
    "minus one on the sequence": {"heads": 2, "inner": 16},
    "unflatten": {"heads": 2},
    "quotient": {"heads": 2, "inner": 16},
    "compared": {"heads": 2},
}


@pytest.mark.parametrize("spelling", WORKS)
def test_the_fewest_attributes_are_set_and_the_plan_is_exact(spelling: str) -> None:
    plan = made(spelling)
    assert plan.modules[""].attributes == WORKS[spelling]
    assert all(plan.parameters[f"{n}.weight"].tp_dim == 0 for n in "qkv")
    assert any("attributes become a rank's share" in text for text in plan.assumptions)
    assert Plan.from_dict(plan.to_dict()) == plan
    proof = autoshard.verify(Sized(spelling), plan, example_inputs=X)
    assert proof.ok, proof


def test_without_its_attributes_the_plan_fails() -> None:
    data = made("minus one on the sequence").to_dict()
    data["modules"][""]["attributes"] = {"heads": 2}
    assert not autoshard.verify(Sized("minus one on the sequence"), data, example_inputs=X).ok


@pytest.mark.parametrize("spelling", ["value", "global"])
def test_what_no_attribute_satisfies_stays_whole(spelling: str) -> None:
    plan = made(spelling)
    assert all(plan.parameters[f"{n}.weight"].tp_dim is None for n in "qkv")
    refused = next(r for r in plan.refused if r.fqn == "q.weight")
    assert refused.where.startswith("test_resize.py:")
    assert not any(m.attributes for m in plan.modules.values())


class Deep(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Sized("plain") for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return F.relu(x)


def test_blocks_that_were_not_traced_are_set_alike() -> None:
    plan = autoshard.plan(Deep(5), world=2, tp=2, example_inputs=X)
    assert plan.modules["blocks.{0-4}"].attributes == {"heads": 2}


def test_a_plan_that_sets_an_unknown_attribute_is_refused() -> None:
    data = made("plain").to_dict()
    data["modules"][""]["attributes"] = {"haeds": 2}
    with pytest.raises(autoshard.AutoshardError, match="the plan sets haeds"):
        autoshard.verify(Sized("plain"), data, example_inputs=X)
