"""Verification on real processes, and what happens when one of them goes wrong."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import verify_workers
from models import Decoder
from torch import nn
from verify_models import FailsOnRanks, Mlp, WithLambda

import autoshard
from autoshard.errors import InvalidArgument, MeshMismatch, ProcessFailed
from autoshard.plans import Mesh, Plan
from autoshard.proving.processes import verify_in_processes
from autoshard.proving.ranks import Crashed, run_on_ranks

LIMIT_SECONDS = 120.0


@functools.cache
def sample() -> tuple[nn.Module, Plan]:
    torch.manual_seed(0)
    model = Decoder(layers=1, head_norm=True, tied=True)
    return model, autoshard.plan(model, world=2, tp=2)


def test_tp_and_fsdp_and_one_step_of_the_optimizer_are_exact() -> None:
    model, plan = sample()
    said: list[str] = []
    proof = verify_in_processes(model, plan, 4, progress=said.append)
    assert proof.ok, str(proof)
    assert proof.mesh == Mesh(dp_shard=2, tp=2)
    assert proof.updates.keys() == proof.parameters.keys()
    assert "run it on 4 processes" in said
    assert str(proof).startswith("exact: 1 output, 21 gradients and 21 updated parameters agree on 4 processes")
    assert "FSDP" not in proof.not_proved
    assert all(p.grad is None for p in model.parameters())


def test_a_missing_gradient_sum_is_wrong_on_processes_too() -> None:
    model, plan = sample()
    data = plan.to_dict()
    data["parameters"]["blocks.0.attention.q_norm.weight"]["grad_sum"] = None
    proof = verify_in_processes(model, data, 2)
    assert not proof.ok
    assert list(proof.wrong) == ["blocks.0.attention.q_norm.weight"]
    assert list(proof.above(proof.updates)) == ["blocks.0.attention.q_norm.weight"]


def test_processes_must_be_a_multiple_of_tp() -> None:
    model, plan = sample()
    with pytest.raises(MeshMismatch, match="3 processes"):
        verify_in_processes(model, plan, 3)


def test_a_model_that_cannot_be_sent_is_refused() -> None:
    model = WithLambda()
    with pytest.raises(InvalidArgument, match="cannot be sent"):
        verify_in_processes(model, autoshard.plan(model, world=2, tp=2), 2)


def test_a_model_that_cannot_be_sent_is_built_from_its_target() -> None:
    model = WithLambda()
    plan = autoshard.plan(model, world=2, tp=2)
    proof = verify_in_processes(model, plan, 2, target="verify_models:WithLambda")
    assert proof.ok, str(proof)


def test_code_that_fails_on_a_rank_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOSHARD_TEST_FAILS", "1")
    model = FailsOnRanks()
    proof = verify_in_processes(model, autoshard.plan(Mlp(), world=2, tp=2), 2)
    assert not proof.ok
    assert "no luck on a rank" in proof.culprits[0].why
    assert proof.culprits[0].where.startswith("verify_models.py:")


def ranks(work: Any, limit_seconds: float = LIMIT_SECONDS) -> Any:
    return run_on_ranks(2, work, b"payload", limit_seconds)


def test_every_rank_answers() -> None:
    assert ranks(verify_workers.answer) == [(2, b"payload")] * 2


def test_what_one_rank_raises_is_returned_while_the_other_waits() -> None:
    found = ranks(verify_workers.fail_on_one)
    assert isinstance(found, Crashed)
    assert "rank 1 is out of luck" in found.traceback


def test_what_one_rank_refuses_is_raised() -> None:
    with pytest.raises(InvalidArgument, match="rank 1 refuses"):
        ranks(verify_workers.refuse_on_one)


def test_a_rank_that_dies_is_named() -> None:
    with pytest.raises(ProcessFailed, match="died with exit code 7"):
        ranks(verify_workers.die_on_one)


def test_ranks_that_do_not_answer_in_time_are_ended() -> None:
    with pytest.raises(ProcessFailed, match="2 of 2 processes did not answer"):
        ranks(verify_workers.hang, limit_seconds=6.0)
