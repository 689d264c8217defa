"""Verification in one process: right plans are exact, every seeded fault is found and named, nothing is left behind."""

from __future__ import annotations

import copy
import functools
import json
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import verify_models
import verify_workers
from models import Decoder, build, hf
from rows import few
from torch import nn

import autoshard
from autoshard.errors import InvalidArgument, PlanMismatch
from autoshard.plans import Plan
from autoshard.testing import assert_plan_exact

ROOT = Path(__file__).parents[2]


@functools.cache
def sample() -> tuple[nn.Module, Plan]:
    """A one-layer decoder with norms over each head, and its plan: it has every kind of fact."""
    torch.manual_seed(0)
    model = Decoder(layers=1, head_norm=True)
    return model, autoshard.plan(model, world=2, tp=2)


# right plans


@pytest.mark.parametrize("name", few(["residual inside", "llama tied", "decoder", "tied", "gemma2"], 2))
def test_a_plan_of_ours_is_exact(name: str) -> None:
    model = build(name, torch.float32)
    proof = autoshard.verify(model, autoshard.plan(model, world=2, tp=2))
    assert proof.ok, str(proof)
    assert list(proof.parameters) == [n for n, _ in model.named_parameters(remove_duplicate=False)]
    assert max(proof.parameters.values()) <= proof.tolerance == 1e-9
    assert proof.outputs
    assert not proof.culprits


def test_buffers_ties_frozen_weights_dropout_and_a_loss_inside() -> None:
    model = verify_models.Everything()
    proof = autoshard.verify(model, autoshard.plan(model, world=2, tp=2))
    assert proof.ok, str(proof)
    assert set(proof.outputs) == {"logits", "loss"}
    assert "head.weight" in proof.parameters


def test_a_plan_of_a_bigger_mesh_is_proved_at_its_tp() -> None:
    model = verify_models.Mlp()
    proof = autoshard.verify(model, autoshard.plan(model, world=8, tp=4, dp_shard=2).to_dict())
    assert proof.ok
    assert proof.tp == 4


def test_a_plan_without_tp_says_that_nothing_is_proved() -> None:
    model = verify_models.Mlp()
    proof = autoshard.verify(model, autoshard.plan(model, world=2, tp=1))
    assert proof.ok
    assert str(proof).startswith("nothing to prove")


def test_inputs_may_be_given() -> None:
    model = verify_models.Mlp()
    inputs = (torch.randn(3, 5, 16),)
    plan = autoshard.plan(model, world=2, tp=2, example_inputs=inputs)
    assert autoshard.verify(model, plan, example_inputs=inputs).ok


def test_a_plan_of_another_model_is_refused() -> None:
    with pytest.raises(PlanMismatch):
        autoshard.verify(verify_models.Mlp(), sample()[1])


# seeded faults: the fault, the kind of the culprit and its name


def no_grad_sum(data: dict[str, Any]) -> None:
    data["parameters"]["blocks.0.attention.q_norm.weight"]["grad_sum"] = None


def no_entry(data: dict[str, Any]) -> None:
    data["modules"]["blocks.0.mlp"]["inputs"] = {}


def no_reduce(data: dict[str, Any]) -> None:
    data["modules"]["blocks.0.mlp.down"]["outputs"] = {}


def bias_everywhere(data: dict[str, Any]) -> None:
    data["parameters"]["blocks.0.attention.o.bias"]["read"] = "local"


def wrong_dim(data: dict[str, Any]) -> None:
    data["parameters"]["blocks.0.attention.o.weight"]["tp_dim"] = 0


@pytest.mark.parametrize(
    ("spoil", "kind", "fqn", "forward_is_right"),
    [
        (no_grad_sum, "gradient sum", "blocks.0.attention.q_norm.weight", True),
        (no_entry, "entry", "blocks.0.norm2", True),
        (no_reduce, "reduce", "blocks.0.mlp", False),
        (bias_everywhere, "bias", "blocks.0.attention.o.bias", False),
        (wrong_dim, "size", "blocks.0.attention.o", False),
    ],
)
def test_a_seeded_fault_is_found_and_named(
    spoil: Callable[[dict[str, Any]], None], kind: str, fqn: str, forward_is_right: bool
) -> None:
    model, plan = sample()
    data = plan.to_dict()
    spoil(data)
    proof = autoshard.verify(model, data)
    assert not proof.ok
    assert (kind, fqn) in [(c.kind, c.fqn) for c in proof.culprits]
    assert all(c.fqn.startswith(fqn) for c in proof.culprits)
    if forward_is_right:
        assert max(proof.outputs.values()) <= proof.tolerance
        assert max(proof.wrong.values()) > 1e-3


def line_of(text: str) -> str:
    lines = Path(verify_models.__file__).read_text().splitlines()
    return f"verify_models.py:{next(n for n, line in enumerate(lines, 1) if line.endswith(text))}"


def test_a_size_written_out_in_the_code_is_named_with_its_line() -> None:
    plan = autoshard.plan(verify_models.Heads(literal=False), world=2, tp=2)
    assert plan.parameters["q.weight"].tp_dim == 0
    proof = autoshard.verify(verify_models.Heads(literal=True), plan)
    assert not proof.ok
    assert proof.culprits[0].kind == "size"
    assert proof.culprits[0].where == line_of("# the sizes")


@pytest.mark.parametrize(
    ("kind", "text"), [(verify_models.Branching, "# a branch"), (verify_models.Reading, "# a number")]
)
def test_code_that_depends_on_the_rank_is_a_finding_and_no_crash(kind: type[nn.Module], text: str) -> None:
    model = kind()
    plan = autoshard.plan(model, world=2, tp=2)
    assert plan.coverage.parameter_bytes > 0.5
    proof = autoshard.verify(model, plan)
    assert not proof.ok
    assert proof.culprits[0].kind in ("size", "value")
    assert proof.culprits[0].where == line_of(text)


def test_the_proof_of_a_fault_prints_what_explains_it() -> None:
    model, plan = sample()
    data = plan.to_dict()
    no_grad_sum(data)
    text = str(autoshard.verify(model, data))
    lines = text.splitlines()
    assert lines[0] == "WRONG: 0 of 1 output and 1 of 21 gradients differ on 2 simulated tp ranks"
    assert "What explains it" in lines
    assert "blocks.0.attention.q_norm.weight" in text
    assert max(map(len, lines)) <= 80


# what is left behind: nothing


def test_the_model_and_the_process_are_left_as_they_were() -> None:
    model = verify_models.Everything().train()
    plan = autoshard.plan(model, world=2, tp=2)
    before = copy.deepcopy(model.state_dict())
    objects = {name: id(p) for name, p in model.named_parameters()}
    random, hook = torch.get_rng_state(), sys.excepthook
    assert autoshard.verify(model, plan).ok
    assert autoshard.verify(model, plan).ok
    assert not dist.is_initialized()
    assert sys.excepthook is hook
    assert torch.equal(torch.get_rng_state(), random)
    assert model.training
    assert {name: id(p) for name, p in model.named_parameters()} == objects
    assert all(p.grad is None for p in model.parameters())
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_nothing_is_left_behind_after_a_crash_on_the_ranks() -> None:
    model = verify_models.Reading()
    hook = sys.excepthook
    assert not autoshard.verify(model, autoshard.plan(model, world=2, tp=2)).ok
    assert not dist.is_initialized()
    assert sys.excepthook is hook


def test_works_in_a_thread() -> None:
    model, plan = sample()
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(autoshard.verify(model, plan).ok))
    thread.start()
    thread.join()
    assert found == [True]


_SESSION = """
import torch
torch.set_num_threads(1)
import autoshard

def session():
    class Local(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = torch.nn.Linear(16, 32), torch.nn.Linear(32, 16)
            self.act = lambda x: torch.relu(x)
        def forward(self, x):
            return self.down(self.act(self.up(x)))
    return Local()

model = session()
proof = autoshard.verify(model, autoshard.plan(model, world=2, tp=2))
print(proof.ok, torch.distributed.is_initialized())
"""


def test_works_in_a_session_without_a_file_on_classes_that_nobody_can_import() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _SESSION], cwd=ROOT, capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.split() == ["True", "False"]
    assert done.stderr == ""


@pytest.mark.parametrize("world", few([1, 2], 1))
def test_works_beside_a_live_group_which_works_afterwards(gloo: Any, world: int) -> None:
    for found in gloo(world).run(verify_workers.verify_beside_a_live_group):
        assert found.pop("proofs") == [True, True]
        assert found.pop("sum") == world
        assert found == dict.fromkeys(found, True)


# the report as data, and the helper for users' tests


def test_a_proof_is_true_or_false_and_becomes_json() -> None:
    model, plan = sample()
    good = autoshard.verify(model, plan)
    data = json.loads(good.to_json())
    assert good
    assert data["ok"] is True
    assert data["mesh"] is None
    assert data["parameters"].keys() == good.parameters.keys()
    assert "FSDP" in data["not_proved"]


def test_progress_is_told() -> None:
    model, plan = sample()
    said: list[str] = []
    autoshard.verify(model, plan, progress=said.append)
    assert any("2 simulated ranks" in text for text in said)


def test_the_helper_for_users_plans_and_returns_the_proof() -> None:
    assert assert_plan_exact(verify_models.Mlp(), tp=4).tp == 4
    model, plan = sample()
    assert assert_plan_exact(model, plan).ok
    assert assert_plan_exact(model, plan.to_dict(), tp=7).tp == 2


def test_the_helper_for_users_fails_with_the_printed_proof() -> None:
    model, plan = sample()
    data = plan.to_dict()
    no_grad_sum(data)
    with pytest.raises(AssertionError, match=r"q_norm\.weight: each rank has only a part"):
        assert_plan_exact(model, data)
    assert assert_plan_exact(model, data, tolerance=10.0).ok
    with pytest.raises(AssertionError, match="WRONG"):
        assert_plan_exact(model, plan, tolerance=0.0)


def test_a_model_that_fails_on_its_inputs_is_refused() -> None:
    model = verify_models.Mlp()
    plan = autoshard.plan(model, world=2, tp=2)
    with pytest.raises(InvalidArgument, match="untouched model fails"):
        autoshard.verify(model, plan, example_inputs=(torch.randn(2, 3, 15),))


def test_half_precision_is_proved_in_double() -> None:
    model = hf("Llama").to(torch.bfloat16)
    proof = autoshard.verify(model, autoshard.plan(model, world=2, tp=2))
    assert proof.ok, str(proof)
    assert proof.tolerance == 1e-9


def test_one_image_through_a_batch_norm_is_compared_with_the_right_gradient() -> None:
    model, image = verify_models.Stem(), (torch.randn(1, 8, 4, 4),)
    plan = autoshard.plan(model, world=2, tp=2, example_inputs=image)
    assert plan.parameters["up.weight"].tp_dim == 0
    assert autoshard.verify(model, plan, example_inputs=image).ok
