"""Conversions at operators and arguments: a text is found by what runs there, not by where it ends."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoshard

X = (torch.randn(2, 5, 24, generator=torch.Generator().manual_seed(0)),)


class Weights(nn.Module):
    """Weights without modules of their own, between a residual and its sum: both conversions are inside the code."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Parameter(torch.randn(24, 32) * 0.2), nn.Parameter(torch.randn(32, 24) * 0.2)


class Operators(Weights):
    def forward(self, x: Tensor) -> Tensor:
        return x + F.gelu(x @ self.up) @ self.down


class OnTheirOwnLines(Weights):
    def forward(self, x: Tensor) -> Tensor:
        y = F.gelu(x @ self.up) @ self.down
        return x + y.relu()


class SumEndsWithACall(Weights):
    """The sum ends where the last product does: only the product is a partial sum."""

    def forward(self, x: Tensor) -> Tensor:
        return x.tanh() + torch.matmul(torch.matmul(x, self.up).relu(), self.down)


class NumberFirst(Weights):
    """The operand that a number stands before is the first that torch is given."""

    def forward(self, x: Tensor) -> Tensor:
        two = 2.0
        y = two * x
        return x - (0.5 * (y @ self.up)).relu() @ self.down


class InPlace(Weights):
    def forward(self, x: Tensor) -> Tensor:
        y = x.sin()
        y = y * 1.5
        y += torch.relu(x @ self.up) @ self.down
        return y


class OverLines(Weights):
    """Parentheses, a function within the function, and a product that begins on another line than it ends."""

    def forward(self, x: Tensor) -> Tensor:
        hidden: Callable[[Tensor], Tensor] = lambda t: (t @ self.up).relu()  # noqa: E731
        return x + (
            hidden(x)
            @ self.down
        )  # fmt: skip


class Normed(Weights):
    """A norm of torch's that is given its weight in the third place, and hands it on by its name."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(24))

    def forward(self, x: Tensor) -> Tensor:
        y = F.rms_norm(x, (24,), self.scale)
        return x + ((y @ self.up).sigmoid() * (y @ self.up).sin()) @ self.down


class ALoop(nn.Module):
    """One text for several layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.ups = nn.ParameterList([torch.randn(24, 32) * 0.2 for _ in range(3)])
        self.gates = nn.ParameterList([torch.randn(24, 32) * 0.2 for _ in range(3)])
        self.downs = nn.ParameterList([torch.randn(32, 24) * 0.2 for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for up, gate, down in zip(self.ups, self.gates, self.downs, strict=True):
            y = F.layer_norm(x, (24,))
            x = x + (F.silu(y @ gate) * (y @ up)) @ down
        return x


CASES: dict[str, type[nn.Module]] = {
    one.__name__: one
    for one in (Operators, OnTheirOwnLines, SumEndsWithACall, NumberFirst, InPlace, OverLines, Normed, ALoop)
}


class Squared(Weights):
    """One tensor is both operands: converting one of them would leave half the gradient."""

    def forward(self, x: Tensor) -> Tensor:
        y = x.softmax(-1)
        y = y * torch.rsqrt((y * y).mean(-1, keepdim=True))
        return x + (y @ self.up).relu() @ self.down


class SquaredByACall(Weights):
    """The same by a function: the tensor is given in two places of one call."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(24))

    def forward(self, x: Tensor) -> Tensor:
        y = x * torch.rsqrt(torch.mul(x, x).mean(-1, keepdim=True) + 1e-6) * self.scale
        return x.tanh() + torch.matmul(torch.matmul(y, self.up).relu(), self.down)


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("name", CASES)
def test_weights_between_operators_are_cut_and_exact(name: str, tp: int) -> None:
    model = CASES[name]()
    plan = autoshard.plan(model, world=tp, tp=tp, example_inputs=X)
    assert all(tensor.tp_dim is not None for tensor in plan.parameters.values() if len(tensor.shape) > 1), str(plan)
    assert {module.style for module in plan.modules.values()}.isdisjoint({"colwise_gather_output"})
    proof = autoshard.verify(model, plan, example_inputs=X)
    assert proof.ok, str(proof)


@pytest.mark.parametrize("kind", ["R->V", "P->R"])
@pytest.mark.parametrize("name", CASES)
def test_each_conversion_at_an_operator_is_needed(name: str, kind: str) -> None:
    model = nn.Sequential(nn.Linear(24, 24), nn.Softmax(-1), CASES[name]())  # before it there is a gradient to lose
    plan = autoshard.plan(model, world=2, tp=2, example_inputs=X)
    module = plan.modules["2"]
    left = tuple(one for one in module.rewrites if repr(kind) not in one.after)
    assert len(left) < len(module.rewrites)
    spoiled = dataclasses.replace(plan, modules={**plan.modules, "2": dataclasses.replace(module, rewrites=left)})
    assert autoshard.verify(model, plan, example_inputs=X).ok
    assert not autoshard.verify(model, spoiled, example_inputs=X).ok


@pytest.mark.parametrize("kind", [Squared, SquaredByACall])
def test_a_tensor_taken_twice_is_not_converted_once(kind: type[nn.Module]) -> None:
    model = nn.Sequential(nn.Linear(24, 24), nn.Softmax(-1), kind())
    plan = autoshard.plan(model, world=2, tp=2, example_inputs=X)
    assert autoshard.verify(model, plan, example_inputs=X).ok


class Masked(Weights):
    """What enters the region comes through a branch that another run does not take."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(24, 24)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y = scores = self.before(x).tanh()
        if mask is not None:
            scores = scores.view(x.shape) + mask
            scores = scores.view(x.shape)
        scores = scores.softmax(-1)
        return y + (scores @ self.up).relu() @ self.down  # type: ignore[no-any-return]


def test_a_conversion_is_not_in_a_branch_that_another_run_may_pass_by() -> None:
    model = Masked()
    plan = autoshard.plan(model, world=2, tp=2, example_inputs=(*X, torch.zeros(2, 5, 24)))
    assert plan.parameters["up"].tp_dim is not None and plan.parameters["down"].tp_dim is not None
    assert autoshard.verify(model, plan, example_inputs=(*X, torch.randn(2, 5, 24))).ok
    assert autoshard.verify(model, plan, example_inputs=X).ok
