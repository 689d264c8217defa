"""Numbers in the code that must follow a cut: counts are set as attributes, offsets are compared."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from brute import Call
from torch import Tensor, nn

import autoshard
from autoshard.ir import Op
from autoshard.passes.factorise import Factored, Factorise
from autoshard.passes.factors import leaves
from autoshard.passes.literals import numbers_of, wrong_number
from autoshard.passes.trace import Trace
from autoshard.plans import Plan


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.enter, self.leave = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)
        self.conv = nn.Conv1d(32, 32, 3, groups=32, padding=2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(self.enter(self.norm(x)).transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)
        return self.norm(x + self.leave(F.silu(y)))  # type: ignore[no-any-return]


class Image(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Conv2d(4, 16, 3, padding=1), nn.Conv2d(16, 4, 3, padding=1)
        self.norm = nn.GroupNorm(4, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = x - x.mean((1, 2, 3), keepdim=True)
        return x + self.leave(F.silu(self.norm(self.enter(x))))  # type: ignore[no-any-return]


COUNTS = {
    "groups": (Mixer, torch.randn(2, 7, 16), "conv", 16),
    "num_groups": (Image, torch.randn(2, 4, 6, 6), "norm", 2),
}


@pytest.mark.parametrize("name", COUNTS)
def test_a_count_is_set_and_the_plan_is_exact(name: str) -> None:
    make, x, module, count = COUNTS[name]
    plan = autoshard.plan(make(), world=2, tp=2, example_inputs=(x,))
    assert plan.modules[module].attributes == {name: count}
    assert plan.parameters[f"{module}.weight"].tp_dim == 0
    proof = autoshard.verify(make(), plan, example_inputs=(x,))
    assert proof.ok, proof


def test_without_its_count_the_plan_fails() -> None:
    make, x, module, _ = COUNTS["num_groups"]
    data = autoshard.plan(make(), world=2, tp=2, example_inputs=(x,)).to_dict()
    data["modules"][module]["attributes"] = {}
    assert not autoshard.verify(make(), Plan.from_dict(data), example_inputs=(x,)).ok


def picked(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """Sixteen rows to cut, then four that stay whole, read by offset and by number."""
    y = F.linear(x, w)
    return y[..., :16], y[..., 16:18], y[..., [18, -1]]


def problems(rank: list[tuple[int, int]], listed: tuple[int, ...]) -> list[str | None]:
    """Compare the code above with one that has other offsets, as a rank of two would run it."""
    whole, share = _factored(picked), _factored(_with(rank, listed))
    cut = frozenset(f for f in leaves(whole.single(whole.traced.parameters[0].value or "")[0]) if f.size == 16)
    assert len(cut) == 1
    numbers = numbers_of(share.traced)

    def problem(want: Op, have: Op) -> str | None:
        own = [literal for literal in whole.literals if literal.op == want.name]
        return wrong_number(own, want, have, numbers, cut, 2)

    pairs = zip(whole.traced.ops, share.traced.ops, strict=True)
    return [problem(want, have) for want, have in pairs if want.target in ("aten.slice", "aten.index")]


def _with(rank: list[tuple[int, int]], listed: tuple[int, ...]) -> object:
    def code(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        y = F.linear(x, w)
        return *(y[..., start:end] for start, end in rank), y[..., list(listed)]

    return code


def _factored(code: object) -> Factored:
    call = Call(code, [torch.randn(20 if code is picked else 12, 16)])  # type: ignore[arg-type]
    return Factorise().run(Trace(given=(torch.randn(2, 3, 16),)).run(call))


def test_offsets_that_follow_pass() -> None:
    assert problems([(0, 8), (8, 10)], (10, -1)) == [None, None, None]
    assert problems([(0, 8), (-4, -2)], (-2, 11)) == [None, None, None]


def test_offsets_that_do_not_follow_are_named() -> None:
    first, second, third = problems([(0, 8), (10, 12)], (8, -1))
    assert first is None
    assert second is not None and "start=10, needed 8" in second
    assert third is not None and "indices=8, needed 10" in third
