"""Chains of random ops: what the analysis leaves free to cut agrees with arithmetic."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
import torch
from brute import Call, check, run
from torch import Tensor

from autoshard.passes.factorise import Factorise

Step = Callable[[Tensor, list[Tensor]], Tensor]


class Chain:
    """A function made of random steps; the weights it needs are made with it."""

    def __init__(self, seed: int, length: int = 7) -> None:
        self.random = random.Random(seed)
        self.weights: list[Tensor] = []
        self.steps: list[Step] = []
        self.start = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(seed))
        value = self.start
        while len(self.steps) < length:
            step = getattr(self, "_" + self.random.choice(KINDS))(value)
            made = step(value, self.weights)
            if 1 < made.dim() < 6 and 4 < made.numel() < 20_000:
                self.steps.append(step)
                value = made

    def __call__(self, x: Tensor, *weights: Tensor) -> Tensor:
        for step in self.steps:
            x = step(x, list(weights))
        return x

    def _weight(self, *shape: int) -> int:
        self.weights.append(torch.randn(*shape, generator=torch.Generator().manual_seed(len(self.weights))))
        return len(self.weights) - 1

    def _dim(self, x: Tensor) -> int:
        return self.random.randrange(x.dim())

    def _linear(self, x: Tensor) -> Step:
        i = self._weight(self.random.choice([8, 12, 24]), x.shape[-1])
        return lambda x, w: torch.nn.functional.linear(x, w[i])

    def _split_dim(self, x: Tensor) -> Step:
        dim = self._dim(x)
        major = self.random.choice([n for n in (1, 2, 3, 4) if x.shape[dim] % n == 0])
        shape = [*x.shape[:dim], major, x.shape[dim] // major, *x.shape[dim + 1 :]]
        return lambda x, w: x.reshape(shape)

    def _merge_dims(self, x: Tensor) -> Step:
        dim = self.random.randrange(x.dim() - 1)
        return lambda x, w: x.flatten(dim, dim + 1)

    def _regroup(self, x: Tensor) -> Step:
        major = self.random.choice([n for n in (2, 3, 4, 6) if math.prod(x.shape[1:]) % n == 0] or [1])
        shape = [x.shape[0], major, math.prod(x.shape[1:]) // major]
        return lambda x, w: x.reshape(shape)

    def _permute(self, x: Tensor) -> Step:
        order = self.random.sample(range(x.dim()), x.dim())
        return lambda x, w: x.permute(order)

    def _slice(self, x: Tensor) -> Step:
        dim = self._dim(x)
        start = self.random.randrange(x.shape[dim])
        length = self.random.randrange(1, x.shape[dim] - start + 1)
        return lambda x, w: x.narrow(dim, start, length)

    def _join(self, x: Tensor) -> Step:
        dim = self._dim(x)
        return lambda x, w: torch.cat([x, x * 2], dim)

    def _gate(self, x: Tensor) -> Step:
        dim = self._dim(x)
        if x.shape[dim] % 2:
            return lambda x, w: x.relu()
        return lambda x, w: torch.mul(*x.chunk(2, dim))

    def _softmax(self, x: Tensor) -> Step:
        dim = self._dim(x)
        return lambda x, w: x.softmax(dim)

    def _sum(self, x: Tensor) -> Step:
        dim, keep = self._dim(x), self.random.random() < 0.5
        return lambda x, w: x.sum(dim, keepdim=keep)

    def _scale(self, x: Tensor) -> Step:
        i = self._weight(*x.shape[self._dim(x) :])
        return lambda x, w: x * w[i]

    def _each(self, x: Tensor) -> Step:
        i = self._weight(x.shape[-2], x.shape[-1], 4)
        return lambda x, w: torch.einsum("...hi,hij->...hj", x, w[i])

    def _roll(self, x: Tensor) -> Step:
        dim = self._dim(x)
        return lambda x, w: x.roll(1, dim)

    def _copies(self, x: Tensor) -> Step:
        dim = self._dim(x)
        return lambda x, w: x.repeat_interleave(2, dim)

    def _scan(self, x: Tensor) -> Step:
        dim = self._dim(x)
        return lambda x, w: x.cumsum(dim)

    def _picked(self, x: Tensor) -> Step:
        return lambda x, w: x[..., [-1, 0]]


KINDS = [name[1:] for name in vars(Chain) if name[0] == "_" and name[1:] not in ("weight", "dim") and name[1] != "_"]


@pytest.mark.parametrize("seed", range(16))
def test_random_chains_hold_on_slices(seed: int) -> None:
    chain = Chain(seed)
    ran = run(Call(chain, chain.weights), (chain.start,))
    assert not Factorise().run(ran.traced).unknown
    check(ran)


def test_the_chains_leave_something_to_check() -> None:
    chains = [Chain(seed) for seed in range(4)]
    assert sum(check(run(Call(chain, chain.weights), (chain.start,))) for chain in chains) > 20
