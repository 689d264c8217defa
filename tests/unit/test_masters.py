"""Which models get float32 masters, what they compute in, and what is refused before anything is changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import autoshard
from autoshard.errors import InvalidArgument
from autoshard.executor.masters import has_master, own_dtype
from autoshard.executor.training import Training
from autoshard.plans import Coverage, Mesh, Plan

MASTERS = Training(masters=torch.float32)
ALONE = Plan(Mesh(), {}, {}, {}, (), {}, (), Coverage(0.0, 0.0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_forward_stays_in_the_models_own_dtype(dtype: torch.dtype) -> None:
    model = nn.Linear(2, 2).to(dtype)
    assert all(has_master(p, torch.float32) for p in model.parameters())
    (unit, root) = (MASTERS.settled(model).policies(root)["mp_policy"] for root in (False, True))
    assert unit == root == MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False)
    assert MASTERS.settled(model).sum_dtype == torch.float32


def test_what_mixed_precision_says_is_kept() -> None:
    for given in ("bfloat16", MixedPrecisionPolicy(torch.float16)):
        training = Training(given, masters=torch.float32)
        assert training.settled(nn.Linear(2, 2)) is training


def test_only_what_is_trained_and_narrower_has_a_master() -> None:
    frozen = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16), requires_grad=False)
    assert not has_master(frozen, torch.float32)
    assert not has_master(nn.Parameter(torch.zeros(2)), torch.float32)
    assert not has_master(nn.Parameter(torch.zeros(2, dtype=torch.float64)), torch.float32)


def test_only_fsdp_has_masters() -> None:
    assert MASTERS.uses_fsdp(ALONE)
    assert not Training().uses_fsdp(ALONE)
    assert str(MASTERS) != str(Training())


def test_several_dtypes_need_to_be_told_what_to_compute_in() -> None:
    model = nn.Sequential(nn.Linear(2, 2).bfloat16(), nn.LayerNorm(2))
    with pytest.raises(InvalidArgument, match="parameters have 2") as error:
        MASTERS.settled(model)
    assert (
        'got: 0.weight: torch.bfloat16, 1.weight: torch.float32\n help: say what to compute in: mixed_precision="b'
        in (str(error.value))
    )
    model[1].bfloat16()
    assert own_dtype(model, torch.float32) == torch.bfloat16


def test_masters_of_nothing_are_refused() -> None:
    for model in (nn.Linear(2, 2), nn.Linear(2, 2).bfloat16().requires_grad_(False), nn.Identity()):
        with pytest.raises(InvalidArgument, match="would change nothing: no trainable parameter is narrower"):
            MASTERS.settled(model)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"masters": torch.bfloat16}, "no masters are kept in torch.bfloat16"),
        ({"masters": "float32"}, "allowed: None, torch.float32"),
        (
            {"masters": torch.float32, "mixed_precision": MixedPrecisionPolicy(reduce_dtype=torch.float32)},
            "a policy without param_dtype would compute in float32",
        ),
    ],
)
def test_an_option_that_does_not_exist(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        Training(**options)
    with pytest.raises(InvalidArgument, match=words):
        autoshard.parallelize(nn.Linear(2, 2), {}, **options)
