"""Sizes in the user's code that come from attributes: set where that is enough, left whole with the line where not."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoshard
from autoshard.executor.settings import set_attributes
from autoshard.passes.trace import Trace
from autoshard.plans import Plan
from autoshard.provenance import Tracker

X = (torch.randn(2, 7, 32),)


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


def test_an_attribute_that_is_also_a_value_is_left_and_its_sizes_are_rewritten() -> None:
    plan = made("value")
    root = plan.modules[""]
    assert not root.attributes
    assert [(r.function, r.before, r.after) for r in root.rewrites] == [("split", "self.heads", "self.heads // 2")]
    assert autoshard.verify(Sized("value"), plan, example_inputs=X).ok


class Configured(nn.Module):
    """Sizes in objects that are shared with others: a config in a config, and a list."""

    def __init__(self, config: SimpleNamespace) -> None:
        super().__init__()
        self.config, self.sections = config, [32, 32, 32]
        self.qkv, self.o = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        shape = (b, s, self.config.text.heads, self.config.size)
        q, k, v = (t.view(shape).transpose(1, 2) for t in self.qkv(x).split(self.sections, dim=-1))
        y = ((q @ k.transpose(-1, -2)).softmax(-1) @ v).transpose(1, 2)
        return self.o(y.reshape(b, s, -1))  # type: ignore[no-any-return]


class Frozen(SimpleNamespace):
    """A config that lets nobody set anything."""

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(name)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config = Frozen(text=Frozen(heads=4), size=8)
        self.one, self.two = Configured(self.config), Configured(self.config)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(x)) * self.config.text.heads  # type: ignore[no-any-return]


def test_sizes_in_objects_are_set_on_copies_that_one_module_has() -> None:
    plan = autoshard.plan(Pair(), world=2, tp=2, example_inputs=X)
    expected = {"config.text.heads": 2, "sections.0": 16, "sections.1": 16, "sections.2": 16}
    assert plan.modules["one"].attributes == plan.modules["two"].attributes == expected
    model = Pair()
    proof = autoshard.verify(model, plan, example_inputs=X)
    assert proof.ok, proof
    assert model.one.config is model.config
    set_attributes(model, plan)
    assert (model.one.config.text.heads, model.one.sections) == (2, [16, 16, 16])
    assert model.config.text.heads == 4
    assert model.one.config is not model.two.config


def test_without_the_copies_the_plan_fails() -> None:
    data = autoshard.plan(Pair(), world=2, tp=2, example_inputs=X).to_dict()
    del data["modules"]["one"]["attributes"]["config.text.heads"]
    assert not autoshard.verify(Pair(), data, example_inputs=X).ok


class Speaker(nn.Module):
    """Two modules that hand a tensor on through one object: with a copy each, nothing would arrive."""

    def __init__(self, board: SimpleNamespace, first: bool) -> None:
        super().__init__()
        self.board, self.first, self.heads = board, first, 4
        self.q, self.o = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        if self.first:
            self.board.scale = x.sum(-1, keepdim=True).tanh()
        y = self.q(x).view(x.shape[0], -1, self.heads, 8)
        return self.o((y.sigmoid() / y.norm(dim=-1, keepdim=True)).flatten(2)) * self.board.scale  # type: ignore[no-any-return]


def test_modules_that_share_an_object_for_another_end_keep_sharing_it() -> None:
    board = SimpleNamespace(level=3)
    model = nn.Sequential(Speaker(board, True), Speaker(board, False))
    plan = autoshard.plan(model, world=2, tp=2, example_inputs=X)
    assert [plan.modules[name].attributes for name in "01"] == [{"heads": 2}, {"heads": 2}]
    assert autoshard.verify(model, plan, example_inputs=X).ok


class Two(nn.Module):
    """Two heads: with one, what is laid out anew already lies as it should, and torch does nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.o = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        y = self.q(x).view(x.shape[0], x.shape[1], -1, 16).transpose(1, 2).contiguous()
        return self.o((y.sigmoid() / y.norm(dim=-1, keepdim=True)).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def test_a_change_of_layout_that_a_share_does_not_need_is_no_difference() -> None:
    plan = autoshard.plan(Two(), world=2, tp=2, example_inputs=X)
    assert (plan.parameters["q.weight"].tp_dim, plan.parameters["o.weight"].tp_dim) == (0, 1)
    assert autoshard.verify(Two(), plan, example_inputs=X).ok


class Grouped(nn.Module):
    """A projection of which only a part is cut, and a convolution in groups."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.kept = 32, 5
        self.joined = 37
        self.up, self.down = nn.Linear(32, 2 * 32 + 5), nn.Linear(32, 32)
        self.conv = nn.Conv1d(37, 37, 3, padding=1, groups=37)
        self.mix = nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        gate, joined = self.up(x).split([self.inner, self.joined], dim=-1)
        joined = self.conv(joined.transpose(1, 2)).transpose(1, 2)
        value, kept = joined.split([self.inner, self.kept], dim=-1)
        return self.down(gate.sigmoid() * value * self.mix(kept.cumsum(-1)))  # type: ignore[no-any-return]


def test_an_attribute_gets_what_is_needed_where_that_is_no_even_share() -> None:
    plan = autoshard.plan(Grouped(), world=2, tp=2, example_inputs=X)
    assert plan.modules[""].attributes == {"inner": 16, "joined": 21}
    assert plan.modules["conv"].attributes == {"groups": 21}
    proof = autoshard.verify(Grouped(), plan, example_inputs=X)
    assert proof.ok, proof


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


class Between(Deep):
    """Counts its blocks, so that all are traced again; the first trace has other blocks in the third one's place."""

    def __init__(self) -> None:
        super().__init__(3)
        self.more = nn.ModuleList(Sized("plain") for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for i, block in enumerate(self.blocks):
            x = block(x) * (1 + i)
        for block in self.more:
            x = block(F.relu(x))
        return x


def test_sizes_of_a_trace_that_was_given_up_are_forgotten() -> None:
    twice, once = Tracker(), Tracker()
    Trace(X, tracker=twice).run(Between())
    Trace(X, tracker=once, whole=True).run(Between())
    uses = [[(use.expression, use.mark, use.dim) for use in one.noted.sizes] for one in (twice, once)]
    assert uses[0] == uses[1]
    assert uses[0]


def test_a_plan_that_sets_an_unknown_attribute_is_refused() -> None:
    data = made("plain").to_dict()
    data["modules"][""]["attributes"] = {"haeds": 2}
    with pytest.raises(autoshard.AutoshardError, match="the plan sets haeds"):
        autoshard.verify(Sized("plain"), data, example_inputs=X)
