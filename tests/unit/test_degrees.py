"""What is worked out once for several tp degrees is what each of them finds alone."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch
from models import MODELS, Mlp, Norm
from sequence_models import make
from torch import Tensor, nn

from autoshard.passes.boundary import Boundaries
from autoshard.passes.cut import ChooseCuts, Chosen
from autoshard.passes.factorise import Factored, Factorise
from autoshard.passes.flow import Flow
from autoshard.passes.inside import find_texts
from autoshard.passes.occurrence import Division
from autoshard.passes.place import Place
from autoshard.passes.sequence import Sequence
from autoshard.passes.states import Placed
from autoshard.passes.stretch import Finder
from autoshard.passes.trace import Trace
from autoshard.plans import Refusal
from autoshard.solver import Solver


class Residual(nn.Module):
    """Extents that every degree divides, on values with a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = Norm(32), Mlp(32, 64)
        self.head = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + self.mlp(self.norm(x)))  # type: ignore[no-any-return]


@functools.cache
def model_of(name: str) -> nn.Module:
    torch.manual_seed(0)
    return Residual() if name == "residual" else MODELS[name]()


@functools.cache
def factored(name: str) -> Factored:
    given = (torch.zeros(2, 8, 32),) if name == "residual" else None
    return Factorise().run(Trace(given).run(model_of(name)))


def solver(name: str, weigh: bool = False) -> Solver:
    texts = functools.cache(lambda: find_texts(model_of(name), factored(name).traced))
    return Solver(factored(name), {}, weigh=weigh, texts=texts)


def facts(placed: Placed) -> dict[str, Any]:
    """Everything that was chosen and placed."""
    names = ("degree", "cuts", "refused", "whys", "divisions", "ways", "inner")
    chosen = {name: getattr(placed.chosen, name) for name in names}
    return {**vars(placed), "chosen": chosen, "keys": [cut.key for cut in placed.chosen.cuts]}


def shared(name: str, weigh: bool, degrees: tuple[int, ...]) -> list[dict[str, Any]]:
    one = solver(name, weigh)
    return [facts(one.place(degree)) for degree in degrees]


def alone(name: str, weigh: bool, degrees: tuple[int, ...]) -> list[dict[str, Any]]:
    return [facts(solver(name, weigh).place(degree)) for degree in degrees]


# ---- cuts and states


@pytest.mark.parametrize("degrees", [(2, 4, 8), (8, 4, 2)])
@pytest.mark.parametrize("weigh", [False, True])
@pytest.mark.parametrize("name", ["residual", "decoder", "head norms", "torch encoder", "nano"])
def test_a_degree_is_cut_and_placed_as_if_it_were_the_only_one(
    name: str, weigh: bool, degrees: tuple[int, ...]
) -> None:
    assert shared(name, weigh, degrees) == alone(name, weigh, degrees)


def test_a_cut_that_kept_the_degree_it_was_made_for_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = alone("torch encoder", False, (2, 4))
    monkeypatch.setattr(Division, "over", lambda self, degree: self)
    assert shared("torch encoder", False, (2, 4)) != wanted


def test_degrees_that_cut_the_same_are_placed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    placed: list[int] = []
    plain = Place.run

    def spy(self: Place, chosen: Chosen) -> Placed:
        placed.append(chosen.degree)
        return plain(self, chosen)

    monkeypatch.setattr(Place, "run", spy)
    one = solver("residual")
    assert one.place(2).conversions == one.place(4).conversions != ()
    assert one.place(4).chosen.degree == 4
    assert placed == [2]


def test_a_cut_that_is_sent_back_for_one_degree_stays_for_the_others() -> None:
    one = solver("residual")
    cut = next(cut for cut in one.place(2).chosen.cuts if not cut.gathered)
    one.banned[4] = {cut.key: Refusal("mlp", "", "sent back")}
    assert cut.leaves.isdisjoint(one.place(4).chosen.inner)
    assert cut.leaves <= one.place(2).chosen.inner
    assert one.place(4).states != one.place(2).states


@pytest.mark.parametrize("name", ["residual", "torch encoder"])
def test_where_nothing_is_cut_all_is_whole_as_a_walk_finds_it(name: str) -> None:
    chosen = ChooseCuts(1).run(solver(name).index)
    flow = Flow(chosen)
    boundaries = Boundaries(flow)
    flow.start()
    for op in flow.traced.ops:
        flow.step(op)
        boundaries.leave(op)
    boundaries.enter_all()
    placed = Place().run(chosen)
    assert placed.states == flow.states
    assert list(placed.states) == list(flow.states)
    assert not boundaries.conversions
    assert not flow.grad_sums()


# ---- the sequence


def placed_pair(model: nn.Module) -> tuple[Placed, Placed]:
    """The same cuts placed by two solvers: equal, and not the same objects."""
    traced = Trace().run(model)
    graph = Factorise().run(traced)
    one, other = (Solver(graph, {}, False, lambda: find_texts(model, traced)) for _ in range(2))
    return one.place(2), other.place(2)


@pytest.mark.parametrize("name", ["decoder", "positions by length", "residual inside"])
def test_the_search_for_a_price_is_the_one_for_the_plan(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make(name)
    one, other = placed_pair(model)
    wanted = facts(Sequence().run(model, other))
    searched: list[object] = []
    plain = Finder.run

    def spy(self: Finder, banned: frozenset[Any]) -> Any:
        searched.append((id(self), banned))
        return plain(self, banned)

    monkeypatch.setattr(Finder, "run", spy)
    sequence = Sequence()
    hoped = sequence.hope(one)
    assert facts(sequence.hope(other)) == facts(hoped)
    assert facts(sequence.run(model, other)) == wanted
    assert len(searched) == len(set(searched)), "something was searched for twice"


def test_other_states_are_searched_anew() -> None:
    one, other = placed_pair(make("decoder"))
    sequence = Sequence()
    sequence.hope(one)
    assert len(sequence._searches) == 1
    sequence.hope(other)
    assert len(sequence._searches) == 1
    sequence.hope(dataclasses.replace(other, conversions=other.conversions[:-1]))
    assert len(sequence._searches) == 2
