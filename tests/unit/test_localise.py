"""Where the code fails on a rank's share, only the cuts that the failing line works on are given up."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoshard
from autoshard.passes.cut import ChooseCuts
from autoshard.passes.factorise import Factorise
from autoshard.passes.localise import Localise
from autoshard.passes.occurrence import Occurrences
from autoshard.passes.place import Place
from autoshard.passes.trace import Trace
from autoshard.plans import Refusal

X = (torch.randn(2, 6, 32),)


class Feed(nn.Module):
    """A feed-forward, with a method between that cares for no size."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(32, width), nn.Linear(width, 32)

    def between(self, h: Tensor) -> Tensor:
        return h

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.between(F.gelu(self.fc1(x))))  # type: ignore[no-any-return]


class Checked(Feed):
    """A method that wants a size, which no attribute and no argument of a call of torch says."""

    def between(self, h: Tensor) -> Tensor:
        self._check(h)
        return h

    def _check(self, h: Tensor) -> None:
        if h.shape[-1] in (32, 48):
            raise ValueError(f"{h.shape[-1]} is too few")

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.between(F.gelu(self.fc1(x))))  # type: ignore[no-any-return]


class Net(nn.Module):
    """Feed-forwards on one another."""

    def __init__(self, *feeds: Feed) -> None:
        super().__init__()
        self.a, self.b, self.c = feeds

    def forward(self, x: Tensor) -> Tensor:
        return self.c(x + self.b(x + self.a(x)))  # type: ignore[no-any-return]


def refused(model: nn.Module) -> Mapping[str, Refusal]:
    """Return what localising refuses of the first cuts."""
    traced = Trace(X).run(model)
    placed = Place().run(ChooseCuts(2, {}, {}).run(Occurrences(Factorise().run(traced))))
    return Localise(X).run(model, placed)


def whole(model: nn.Module) -> set[str]:
    """Return the first layers that a plan leaves whole or gathers, and see that the plan is exact."""
    plan = autoshard.plan(model, world=2, tp=2, example_inputs=X)
    proof = autoshard.verify(model, plan, example_inputs=X)
    assert proof.ok, proof
    return {name for name in ("a", "b", "c") if plan.parameters[f"{name}.fc2.weight"].tp_dim != 1}


def test_a_method_that_fails_gives_up_the_cuts_of_the_line_that_calls_it() -> None:
    found = refused(Net(Feed(), Checked(), Feed()))
    assert ["b.fc1" in key for key in found] == [True], found
    assert all(r.where.startswith("test_localise.py:") and "32 is too few" in r.why for r in found.values())
    assert whole(Net(Feed(), Checked(), Feed())) == {"b"}


def test_modules_alike_are_given_up_at_once_and_others_at_the_same_line_are_kept() -> None:
    found = refused(Net(Checked(), Checked(128), Checked()))
    assert sorted(key.split(".")[0] for key in found) == ["a", "c"], found
    assert whole(Net(Checked(), Checked(128), Checked())) == {"a", "c"}


def test_others_that_fail_at_the_same_line_are_found_next() -> None:
    assert whole(Net(Checked(), Checked(96), Feed())) == {"a", "b"}


def test_code_that_follows_gives_up_nothing() -> None:
    assert not refused(Net(Feed(), Checked(128), Feed()))
    assert whole(Net(Feed(), Checked(128), Feed())) == set()
