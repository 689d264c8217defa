"""A module that the example inputs do not reach is named, with what they leave out."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import autoshard

X, IMAGE = torch.randn(2, 7, 32), torch.randn(2, 7, 12)


class Towers(nn.Module):
    def __init__(self, inner: int = 64) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
        self.tower = nn.ModuleDict({"patch": nn.Linear(12, inner), "out": nn.Linear(inner, 32)})

    def forward(self, x: Tensor, image: Tensor | None = None, scale: float = 1.0) -> Tensor:
        if image is not None:
            x = x + scale * self.tower["out"](self.tower["patch"](image).relu())
        return x + self.down(self.up(x).relu())  # type: ignore[no-any-return]


def test_the_modules_are_named_with_what_was_not_given() -> None:
    plan = autoshard.plan(Towers(), world=2, tp=2, example_inputs=((X,), {"scale": 2.0}))
    (warning,) = plan.warnings
    assert "never calls tower, 41.0% of the parameter bytes" in warning
    assert warning.endswith("(it was not given image)")


def test_nothing_is_said_where_all_is_called() -> None:
    assert not autoshard.plan(Towers(), world=2, tp=2, example_inputs=(X, IMAGE)).warnings


def test_nothing_is_said_of_what_holds_next_to_nothing() -> None:
    model = Towers(inner=1)
    model.tower["patch"], model.tower["out"] = nn.Linear(12, 1), nn.Linear(1, 1)
    assert not autoshard.plan(model, world=2, tp=2, example_inputs=(X,)).warnings
