"""The simulation is the real thing: its gradients equal those of gloo ranks bit by bit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import simulation_workers
import torch
from models import build
from rows import few
from simulation_workers import DROPPED, LENGTHS, backward, make_inputs, model_and_plan
from torch import Tensor

from autoshard.executor.execute import apply, make_mesh
from autoshard.proving.simulate import on_each_rank, simulated


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Kernels add in another order on two threads; the ranks have one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


NAMES = ["decoder", "residual inside", "head norms", "tied", "llama"]
TP = 2


def simulate(name: str, drop: bool = False) -> list[dict[str, Tensor]]:
    """Outputs and gradients of both simulated ranks."""
    model, plan = model_and_plan(name, TP, drop)
    inputs = make_inputs()
    with simulated(TP):
        apply(model, plan, make_mesh(plan, "cpu"))
        found = backward(model, inputs)
        ranks = {key: on_each_rank(tensor, TP) for key, tensor in found.items()}
    return [{key: tensors[rank] for key, tensors in ranks.items()} for rank in range(TP)]


@pytest.mark.parametrize("name", few(NAMES, ["head norms", "tied"]))
def test_gradients_equal_those_of_real_ranks_bit_by_bit(gloo: Any, name: str) -> None:
    real = gloo(TP).run(simulation_workers.run_for_real, name, TP)
    for got, want in zip(simulate(name), real, strict=True):
        assert got.keys() == want.keys()
        assert len(got) == len(LENGTHS) + len(list(build(name).named_parameters()))
        different = [key for key in want if not torch.equal(got[key], want[key])]
        assert different == []


def test_a_wrong_gradient_is_the_same_wrong_gradient(gloo: Any) -> None:
    real = gloo(TP).run(simulation_workers.run_for_real, "head norms", TP, drop=True)
    wrong = simulate("head norms", drop=True)
    right = simulate("head norms")
    for got, want, other in zip(wrong, real, right, strict=True):
        assert all(torch.equal(got[key], want[key]) for key in want)
        assert not torch.equal(got[DROPPED], other[DROPPED])


def test_ranks_hold_different_shares() -> None:
    first, second = simulate("decoder")
    assert any(not torch.equal(first[key], second[key]) for key in first)
