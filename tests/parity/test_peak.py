"""The predicted peak of a step against what torch's memory trackers see on fake tensors."""

from __future__ import annotations

import statistics
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
from models import Decoder, hf
from rows import few
from torch import nn
from tracked_peak import Point, tracked

from autoshard import cost
from autoshard.passes import profile
from autoshard.passes.extents import ZERO

EACH, MIDDLE = 0.1, 0.05


def llama() -> nn.Module:
    return hf("Llama", hidden_size=64, intermediate_size=128, head_dim=16, vocab_size=256, use_cache=False)


def gpt2() -> nn.Module:
    return hf("GPT2", hidden_size=64, num_hidden_layers=4, vocab_size=256, attn_pdrop=0.0, use_cache=False)


def mixtral() -> nn.Module:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "vocab_size": 256}
    return hf("Mixtral", num_local_experts=4, num_experts_per_tok=2, use_cache=False, **sizes)


#: ``benchmarks/peak.py`` has larger ones
POINTS = {
    point.name: point
    for point in (
        Point("parameters", llama, (1, 4, 1), 1, 4),
        Point("tp alone", llama, (1, 1, 2), 2, 32),
        Point(
            "sequence cut, selective",
            llama,
            (2, 2, 2),
            2,
            32,
            {"checkpointing": "selective", "sequence_parallel": True},
        ),
        Point("replicas, mixed precision", Decoder, (4, 1, 1), 4, 64, {"mixed_precision": "bfloat16"}, torch.float32),
        Point("gpt2, full", gpt2, (1, 4, 1), 2, 64, {"checkpointing": "full"}),
        Point("experts, masters", mixtral, (1, 4, 1), 2, 32, {"masters": "float32"}),
    )
}


@cache
def seen(name: str) -> int:
    point = POINTS[name]
    return tracked(point, point.plan())


def ratio(name: str) -> float:
    """Return predicted over tracked bytes."""
    return POINTS[name].plan().peak_bytes / seen(name)


@cache
def found(name: str) -> float:
    return ratio(name)


@pytest.mark.parametrize("name", few(POINTS, 3))
def test_the_peak_is_predicted(name: str) -> None:
    assert found(name) == pytest.approx(1, abs=EACH)


def test_the_middle_is_closer() -> None:
    assert statistics.median([abs(found(name) - 1) for name in POINTS]) <= MIDDLE


@pytest.mark.parametrize(
    ("where", "part", "without", "name"),
    [
        (cost, "LOSS_BYTES", 0, "tp alone"),
        (cost, "gathered_bytes", lambda unit: 0, "parameters"),
        (cost, "kept_bytes", lambda unit, checkpointing: 0, "tp alone"),
        (cost, "state_bytes", lambda units, s: 0, "parameters"),
        (profile, "worst_moment", lambda steps, size: ZERO, "parameters"),
    ],
)
def test_a_term_that_is_left_out_is_found(where: Any, part: str, without: Any, name: str) -> None:
    with mock.patch.object(where, part, without):
        assert abs(ratio(name) - 1) > EACH
