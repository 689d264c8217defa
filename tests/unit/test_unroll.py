"""Repeated blocks are traced twice and written out: the same graph, and the same plan, as the whole trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import Block, Decoder, hf
from rows import few
from torch import Tensor, nn

from autoshard.api import plan as make_plan
from autoshard.passes import trace as tracing
from autoshard.passes.counted import attributes_in_branches, loops_by_number
from autoshard.passes.trace import Trace
from autoshard.passes.unroll import find_repeats

IDS = (torch.zeros(2, 7, dtype=torch.long),)


class TwoKinds(Decoder):
    """Blocks alternate between heads with norms and without, and each knows its own number."""

    def __init__(self, layers: int) -> None:
        super().__init__(layers=0)
        self.blocks = nn.ModuleList(Block(head_norm=i % 2 == 1) for i in range(layers))
        for i, block in enumerate(self.blocks):
            block.index = i  # type: ignore[assignment]


class Indexed(Decoder):
    """The loop counts to a number of its own, so that no block can be left out."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for i in range(6):
            x = self.blocks[i](x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


class Scaled(Decoder):
    """The model works between its blocks."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for i, block in enumerate(self.blocks):
            x = block(x) * (1 + i)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


class Pooled(Decoder):
    """The loop does more at a number that is none of the first."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for i, block in enumerate(self.blocks):
            x = self.step(i, block, x)
            if i == 4:
                x = x + x.mean(1, keepdim=True)
        return self.head(self.norm(x))  # type: ignore[no-any-return]

    def step(self, number: int, block: nn.Module, x: Tensor) -> Tensor:
        return block(x)  # type: ignore[no-any-return]


class Numbered(nn.Module):
    """A block that does more if its own number is none of the first."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.inner = number, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.inner(x)
        return x.flip(1) if self.number is not None and self.number == 4 else x


class Told(nn.Module):
    """A block that is told its number and hands it on."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def more(self, x: Tensor, number: int) -> Tensor:
        return x.flip(1) if number == 4 else x

    def forward(self, x: Tensor, number: int) -> Tensor:
        return self.more(x + self.inner(x), number)


class Deciding(Told):
    """It decides by it."""

    def forward(self, x: Tensor, number: int) -> Tensor:
        x = x + self.inner(x)
        return x.flip(1) if number == 4 else x


class Counting(Told):
    """It only counts with it."""

    def forward(self, x: Tensor, number: int) -> Tensor:
        return x + self.inner(x) * number  # type: ignore[no-any-return]


class Telling(nn.Module):
    """The loop tells blocks their numbers."""

    def __init__(self, kind: type[Told]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(kind() for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for i, block in enumerate(self.blocks):
            x = block(x, number=i)
        return x


class Deepened(Decoder):
    """Blocks differ in a number that their code uses."""

    def __init__(self, layers: int) -> None:
        super().__init__(layers=layers)
        for i, block in enumerate(self.blocks):
            block.norm1.eps = 10.0 ** -(i + 1)  # type: ignore[union-attr]


MODELS: dict[str, tuple[Callable[[], nn.Module], bool]] = {
    "alike": (lambda: Decoder(layers=7), True),
    "two kinds": (lambda: TwoKinds(9), True),
    "llama": (lambda: hf("Llama", num_hidden_layers=5), True),
    "gemma2, sliding and full": (lambda: hf("Gemma2", num_hidden_layers=7), True),
    "qwen3": (lambda: hf("Qwen3", num_hidden_layers=4), True),
    "counted loop": (lambda: Indexed(layers=6), False),
    "work between": (lambda: Scaled(layers=6), False),
    "other numbers": (lambda: Deepened(6), False),
    "more at a number": (lambda: Pooled(layers=6), False),
}


@pytest.mark.parametrize("name", few(MODELS, ["two kinds", "llama", "other numbers"]))
def test_the_plan_is_that_of_the_whole_trace(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = MODELS[name][0]()
    given: Any = {"input_ids": IDS[0]} if hasattr(model, "config") else IDS
    folded = make_plan(model, world=4, tp=2, example_inputs=given)
    monkeypatch.setattr(tracing, "find_repeats", lambda *_: ())
    whole = make_plan(model, world=4, tp=2, example_inputs=given)
    assert folded.to_dict() == whole.to_dict()
    assert folded == whole


@pytest.mark.parametrize("name", MODELS)
def test_only_what_repeats_is_left_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, repeats = MODELS[name][0](), MODELS[name][1]
    lengths: list[int] = []
    once = Trace._once

    def spy(self: Trace, traced: nn.Module, kept: dict[str, int]) -> Any:
        lengths.append(len(kept))
        return once(self, traced, kept)

    monkeypatch.setattr(Trace, "_once", spy)
    given: Any = {"input_ids": IDS[0]} if hasattr(model, "config") else IDS
    Trace(given=given).run(model)
    tried_and_given_up = lengths[-1] == 0
    assert tried_and_given_up is not repeats


def test_blocks_with_their_own_number_are_of_one_kind() -> None:
    model = TwoKinds(9)
    children = tuple(f"blocks.{i}" for i in range(9))
    (found,) = find_repeats(model, (children,))
    assert found.kinds == (0, 1, 0, 1, 0, 1, 0, 1, 0)
    assert found.kept == 4


def test_blocks_that_decide_by_their_number_are_of_different_kinds() -> None:
    model = nn.Module()
    model.blocks = nn.ModuleList(Numbered(i) for i in range(6))
    children = tuple(f"blocks.{i}" for i in range(6))
    assert find_repeats(model, (children,)) == ()
    assert attributes_in_branches(Numbered(0)) == {"number"}
    assert loops_by_number(Pooled())
    assert not loops_by_number(Scaled())


@pytest.mark.parametrize(("kind", "repeats"), [(Counting, True), (Deciding, False), (Told, False)])
def test_blocks_that_decide_by_a_number_they_are_told_are_all_traced(kind: type[Told], repeats: bool) -> None:
    model = Telling(kind)
    assert bool(find_repeats(model, (tuple(f"blocks.{i}" for i in range(6)),))) is repeats
    traced = Trace(given=(torch.zeros(2, 7, 8),)).run(model)
    assert sum("flip" in op.target for op in traced.ops) == (0 if repeats else 1)
