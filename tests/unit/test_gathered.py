"""What a lone matrix makes stays cut as far as vectors work on it, and is made whole behind the last of them."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn

import autoshard


class ScaledHead(nn.Linear):
    """A head with a scale for each answer, in a method that calls its base's."""

    def __init__(self, soft: bool = False) -> None:
        super().__init__(32, 64, bias=False)
        self.scale, self.soft = nn.Parameter(torch.randn(64)), soft

    def forward(self, x: Tensor) -> Tensor:
        logits = super().forward(x).float() * (self.scale.float() * 3.0)
        return logits.softmax(-1) if self.soft else logits


class Headed(nn.Module):
    def __init__(self, soft: bool = False) -> None:
        super().__init__()
        self.norm, self.head = nn.LayerNorm(32), ScaledHead(soft)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x))  # type: ignore[no-any-return]


X = (torch.randn(2, 7, 32, generator=torch.Generator().manual_seed(1)),)


def test_a_vector_behind_the_matrix_is_cut_with_it() -> None:
    torch.manual_seed(0)
    model = Headed()
    made = autoshard.plan(model, world=2, tp=2, example_inputs=X)
    assert [made.parameters[f"head.{name}"].tp_dim for name in ("weight", "scale")] == [0, 0]
    assert made.modules["head"].outputs == {"": "S(-1)->R"}
    assert autoshard.verify(model, made, example_inputs=X).ok
    head = dataclasses.replace(made.modules["head"], inputs={})
    spoiled = dataclasses.replace(made, modules={**made.modules, "head": head})
    assert not autoshard.verify(model, spoiled, example_inputs=X).ok


def test_inside_the_code_it_is_made_whole_where_the_last_vector_was() -> None:
    torch.manual_seed(0)
    model = Headed(soft=True)
    made = autoshard.plan(model, world=2, tp=2, example_inputs=X)
    assert autoshard.verify(model, made, example_inputs=X).ok
