"""The sequence cut between regions on real processes: gradients, recomputation, refusals, decoding, dropout."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import sequence_workers
import torch
from models import build
from rows import few
from sequence_models import CUT, make
from simulate import CountCollectives, fake_world

from autoshard.api import plan as make_plan
from autoshard.executor.execute import apply, make_mesh
from autoshard.plans import Plan

TOLERANCE = 1e-9


@functools.cache
def planned(name: str, **degrees: int) -> Plan:
    degrees = {"world": 2, "tp": 2, **degrees}
    plan = make_plan(make(name), sequence_parallel=True, **degrees)  # type: ignore[arg-type]
    assert plan.sequence
    return plan


def wrong(errors: dict[str, float]) -> dict[str, float]:
    return {key: error for key, error in errors.items() if not error < TOLERANCE}


@pytest.mark.parametrize("name", few(CUT, 5))
def test_trains_as_one_process(gloo: Any, name: str) -> None:
    for errors in gloo(2).run(sequence_workers.parity, name, planned(name).to_dict()):
        assert wrong(errors) == {}


@pytest.mark.parametrize("name", few(["decoder", "tied", "parameters of blocks"], 1))
def test_trains_under_fsdp(gloo: Any, name: str) -> None:
    for errors in gloo(4).run(sequence_workers.parity, name, planned(name, world=4, dp_shard=2).to_dict()):
        assert wrong(errors) == {}


@pytest.mark.parametrize("how", ["ours", "reentrant", "not reentrant"])
def test_what_is_recomputed_is_cut_as_its_forward_was(gloo: Any, how: str) -> None:
    for errors in gloo(2).run(sequence_workers.parity, "pre-norm", planned("pre-norm").to_dict(), how):
        assert wrong(errors) == {}


@pytest.mark.long
def test_compiled_blocks(gloo: Any) -> None:
    for errors in gloo(2).run(sequence_workers.parity, "pre-norm", planned("pre-norm").to_dict(), "compiled"):
        assert wrong(errors) == {}


def test_four_ranks(gloo: Any) -> None:
    plan = planned("pre-norm", world=4, tp=4)
    for errors in gloo(4).run(sequence_workers.parity, "pre-norm", plan.to_dict()):
        assert wrong(errors) == {}


def test_what_is_refused(gloo: Any) -> None:
    for said in gloo(2).run(sequence_workers.said, "pre-norm", planned("pre-norm").to_dict()):
        assert said["length"].startswith(
            "cannot cut a sequence of 7 over 2 tensor-parallel ranks\n"
            "   at: the model, argument ids\n"
            "  got: length 7 (dim 1); allowed: a multiple of 2, such as 8\n"
            " help: pad the batch"
        )
        assert said["ran"] == ""
        for alone in ("a block alone", "a norm alone"):
            assert said[alone].startswith("gradients are wanted outside of a forward of the model that has them")
        assert said.keys() == {"length", "ran", "a block alone", "a norm alone"}


def test_what_a_model_hands_out_is_whole(gloo: Any) -> None:
    for errors in gloo(2).run(sequence_workers.collected, "pre-norm", planned("pre-norm").to_dict()):
        assert max(errors) < TOLERANCE


def test_generates_token_by_token_between_training_steps(gloo: Any) -> None:
    ids = torch.zeros(2, 8, dtype=torch.long)
    plan = make_plan(build("llama"), world=2, tp=2, sequence_parallel=True, example_inputs={"input_ids": ids})
    assert plan.sequence == {"input_ids": 1}
    for got, want, error in gloo(2).run(sequence_workers.generated, plan.to_dict()):
        assert got == want
        assert len(got) == 2 * 12
        assert error < TOLERANCE


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_each_rank_drops_places_of_its_own_in_training_and_the_same_otherwise(gloo: Any, checkpointing: str) -> None:
    plan = planned("dropping")
    assert {fqn for fqn, module in plan.module_plans() if module.draws == "sequence"} == {
        "blocks.0.drop",
        "blocks.1.drop",
    }
    for answer in gloo(2).run(sequence_workers.dropped, plan.to_dict(), checkpointing):
        assert wrong(answer["errors"]) == {}
        assert set(answer["shapes"]) == {(2, 4, 16)}
        assert not answer["same masks"]
        assert answer["ranks agree without gradients"]


@pytest.mark.parametrize("name", CUT)
def test_a_step_sends_what_the_plan_says(name: str) -> None:
    model = make(name)
    ids = torch.zeros(2, 8, dtype=torch.long)
    plan = make_plan(model, world=2, tp=2, sequence_parallel=True, example_inputs=(ids,), batch=2, sequence=8)
    with fake_world(2):
        apply(model, plan, make_mesh(plan, "cpu"))
        model(ids).sum().backward()
        with CountCollectives() as seen:
            model(ids).sum().backward()
    real = {"all_reduce": "allreduce_", "all_gather": "_allgather_base_", "reduce_scatter": "_reduce_scatter_base_"}
    for op, name_of_op in real.items():
        planned_ones = [c for c in plan.collectives if c.op == op]
        assert seen.count(name_of_op) == sum(c.count for c in planned_ones), op
    parts = sum(n for op, n in seen.seen if op == real["all_reduce"])
    assert parts * 8 == sum(c.bytes for c in plan.collectives if c.op == "all_reduce")


def test_a_dense_layer_costs_two_of_each_in_each_direction() -> None:
    found = {}
    for layers in (1, 2):
        from models import Decoder

        plan = make_plan(Decoder(layers=layers), world=2, tp=2, sequence_parallel=True)
        found[layers] = {c.op: c.count for c in plan.collectives if c.what == "activation"}
    assert {op: found[2][op] - found[1][op] for op in found[2]} == {"all_gather": 4, "reduce_scatter": 4}
