"""Code that asks for values is followed with made-up ones where that shows all of it, else it is kept out."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from opaque_models import (
    WIDTH,
    BareExperts,
    BranchingExperts,
    FlatExperts,
    HitExperts,
    MixedUp,
    PlainStackedExperts,
    Ragged,
    StackedExperts,
)
from torch import Tensor, nn

import autoshard
from autoshard.guesses import Answers, explore
from autoshard.passes.trace import Trace
from autoshard.plans import Plan
from autoshard.twin import make_twin

X = (torch.randn(2, 7, WIDTH, generator=torch.Generator().manual_seed(1)),)


def planned(model: nn.Module, given: object = X, tp: int = 2) -> Plan:
    return autoshard.plan(model, world=tp, tp=tp, example_inputs=given)


def built(kind: type[nn.Module], **options: int) -> nn.Module:
    torch.manual_seed(0)
    return kind(**options)


def cuts(plan: Plan, *names: str) -> list[int | None]:
    return [plan.parameters[name].tp_dim for name in names]


@pytest.mark.parametrize("tp", [2, 4])
def test_each_expert_of_a_stack_is_cut_and_the_sum_comes_last(tp: int) -> None:
    model = built(PlainStackedExperts)
    made = planned(model, tp=tp)
    assert cuts(made, "up", "down") == [1, 2]
    assert made.modules[""].inputs == {"x": "R->V"}
    assert made.modules[""].outputs == {"": "P->R"}
    assert not made.modules[""].rewrites
    assert any("made-up ones: the model" in text for text in made.assumptions)
    assert not any("cannot be traced" in text for text in made.warnings)
    assert autoshard.verify(model, made, example_inputs=X).ok


def test_the_sum_may_be_what_the_loop_added_to() -> None:
    model, rows = built(BareExperts), (X[0].flatten(0, 1),)
    made = planned(model, rows)
    assert cuts(made, "up", "down") == [1, 2]
    assert made.modules[""].outputs == {"": "P->R"}
    assert autoshard.verify(model, made, example_inputs=rows).ok


def test_what_passes_an_expert_by_is_whole_so_the_sum_comes_first() -> None:
    model = built(StackedExperts, idle=2)
    made = planned(model)
    assert cuts(made, "up", "down") == [1, 2]
    assert not made.modules[""].outputs
    assert [one.after for one in made.modules[""].rewrites] == [
        "convert('P->R', F.linear(F.silu(one) * two, self.down[expert]))",
        "convert('R->V', mine)",
    ]
    assert autoshard.verify(model, made, example_inputs=X).ok


def test_a_sum_that_comes_too_late_is_wrong() -> None:
    model = built(StackedExperts, idle=2)
    made = planned(model)
    rewrites = made.modules[""].rewrites
    late = dataclasses.replace(made.modules[""], rewrites=rewrites[1:], outputs={"": "P->R"})
    spoiled = dataclasses.replace(made, modules={**made.modules, "": late})
    assert not autoshard.verify(model, spoiled, example_inputs=X).ok


@pytest.mark.parametrize("kind", [BranchingExperts, MixedUp])
def test_code_of_which_one_run_shows_a_part_or_states_that_differ_stays_whole(kind: type[nn.Module]) -> None:
    model = built(kind)
    made = planned(model)
    assert cuts(made, "up", "down") == [None, None]
    assert autoshard.verify(model, made, example_inputs=X).ok


def test_an_arm_that_no_number_reaches_keeps_the_code_out() -> None:
    assert [part.fqn for part in Trace(X).run(built(StackedExperts)).untraced] == [""]
    assert not Trace(X).run(built(StackedExperts, idle=2)).untraced


def test_rows_of_all_experts_in_one_dim_are_cut_in_each() -> None:
    model = built(FlatExperts)
    made = planned(model)
    assert cuts(made, "held.up", "held.down") == [0, 0]
    assert len(made.parameters["held.up"].tp_parts or ()) == 4
    assert autoshard.verify(model, made, example_inputs=X).ok


def test_lists_of_experts_are_traced_one_by_one_as_ever() -> None:
    assert [part.fqn for part in Trace(X).run(built(HitExperts)).untraced] == [""]


def test_lengths_that_must_fit_are_those_of_a_run_on_values() -> None:
    model = built(Ragged)
    given = (X[0][0], torch.tensor([3, 4]))
    made = planned(model, given)
    assert cuts(made, "up.weight", "down.weight") == [0, 1]
    assert autoshard.verify(model, made, example_inputs=given).ok


def test_a_plan_needs_no_values() -> None:
    with torch.device("meta"):
        model = PlainStackedExperts()
    assert cuts(planned(model), "up", "down") == [1, 2]


class Endless(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        while not x.sum().item() > 5:
            x = x * self.weight
        return x


def test_code_that_waits_for_a_value_is_given_up() -> None:
    twin = make_twin(Endless())
    with twin.mode:
        assert explore(twin.model, (torch.ones(3),), {}) is None


def test_answers_reach_both_arms_of_a_branch() -> None:
    twin = make_twin(built(StackedExperts, idle=2))
    with twin.mode:
        assert explore(twin.model, (torch.ones(2, 7, WIDTH),), {}) == Answers((0, 1, 0, 4))


class Chunked(nn.Module):
    """Of the rows that a mask finds for each query, whole pairs are averaged; a query may find less than a pair."""

    def __init__(self, least: float = 0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.pair, self.least = 2, least

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        mask = mask if mask.dtype == torch.bool else mask == 0
        rows = x.reshape(-1, WIDTH)
        out = torch.zeros_like(rows)
        for query in range(mask.shape[0]):
            found = mask[query].nonzero().flatten()
            pairs = found.shape[0] // self.pair
            if pairs > self.least:
                mine = rows.index_select(0, found[: pairs * self.pair]).view(pairs, self.pair, WIDTH).mean(1)
                done = self.down(self.up(mine).relu()).sum(0)
            else:
                done = torch.zeros(WIDTH)
            out[query] = done
        return out.view_as(x)


MASK = torch.ones(14, 14, dtype=torch.bool).tril()


def test_both_arms_of_a_branch_on_how_many_rows_are_found_are_followed_without_values() -> None:
    with torch.device("meta"):
        model, given = Chunked(), (torch.empty(2, 7, WIDTH), torch.empty(14, 14, dtype=torch.bool))
    assert cuts(planned(model, given), "up.weight", "down.weight") == [0, 1]
    assert not Trace(given).run(model).untraced


def test_what_was_followed_so_is_exact() -> None:
    model, given = built(Chunked), (X[0], MASK)
    made = planned(model, given)
    assert cuts(made, "up.weight", "down.weight") == [0, 1]
    assert autoshard.verify(model, made, example_inputs=given).ok
    assert made.modules["down"].outputs == {"": "P->R"}
    spoiled = dataclasses.replace(made, modules={k: m for k, m in made.modules.items() if k != "down"})
    assert not autoshard.verify(model, spoiled, example_inputs=given).ok


def test_an_arm_that_no_count_reaches_keeps_the_code_out() -> None:
    with torch.device("meta"):
        model, given = Chunked(least=0.5), (torch.empty(2, 7, WIDTH), torch.empty(14, 14, dtype=torch.bool))
        never = Chunked(least=float("inf"))
    assert not Trace(given).run(model).untraced
    assert [part.fqn for part in Trace(given).run(never).untraced] == [""]


class UnderTests(nn.Module):
    """One arm of a test that no value decides never runs; ``when`` says where the test stands."""

    def __init__(self, when: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.when = when

    def forward(self, x: Tensor) -> Tensor:
        return getattr(self, self.when)(x)  # type: ignore[no-any-return]

    def before(self, x: Tensor) -> Tensor:
        rows = x[0] if x.dim() == 3 else x
        return rows[int(rows.argmax())] * self.weight

    def behind(self, x: Tensor) -> Tensor:
        row = x[int(x.argmax())] * self.weight
        return row[0] if row.dim() == 3 else row

    def asking(self, x: Tensor) -> Tensor:
        return x[0] if x.argmax().item() == x.dim() + 5 else x * self.weight

    def again(self, x: Tensor) -> Tensor:
        for _ in range(2):
            rows = x[0] if x.dim() == 3 else x
            x = rows * self.weight + int(x.argmax())
        return x


@pytest.mark.parametrize("when", ["before", "behind", "asking", "again"])
def test_only_a_test_ahead_of_every_question_may_leave_an_arm_out(when: str) -> None:
    twin = make_twin(UnderTests(when))
    with twin.mode:
        found = explore(twin.model, (torch.ones(2, 3),), {})
    assert (found is not None) == (when == "before")
