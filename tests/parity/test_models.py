"""Plans of real models on real processes against one process: outputs, loss, every gradient, optimizer steps."""

from __future__ import annotations

from typing import Any

import model_workers
import pytest
import torch
from models import build
from rows import few

from autoshard.api import plan as make_plan

NAMES = ["decoder", "residual inside", "head norms", "tied", "llama", "llama tied", "qwen3", "mistral", "gemma2"]
MESHES = {
    "tp 2": {"world": 2, "tp": 2},
    "fsdp x tp": {"world": 4, "tp": 2, "dp_shard": 2},
}
#: Every model over tp, some of them under FSDP too.
KEPT = [*((name, "tp 2") for name in NAMES), *((name, "fsdp x tp") for name in ("tied", "qwen3"))]
MORE_MESHES = {
    "fsdp": {"world": 2, "tp": 1, "dp_shard": 2},
    "ddp x tp": {"world": 4, "tp": 2, "dp_shard": 1, "dp_replicate": 2},
    "hsdp": {"world": 4, "tp": 1, "dp_shard": 2, "dp_replicate": 2},
    "hsdp x tp": {"world": 8, "tp": 2, "dp_shard": 2, "dp_replicate": 2},
}


def made(name: str, degrees: dict[str, int]) -> Any:
    ids = torch.zeros(2, 7, dtype=torch.long)
    model = build(name)
    return make_plan(model, example_inputs={"input_ids": ids} if hasattr(model, "config") else (ids,), **degrees)  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "mesh"), few(((n, m) for n in NAMES for m in MESHES), KEPT))
def test_gradients_equal_one_process(gloo: Any, name: str, mesh: str) -> None:
    plan = made(name, MESHES[mesh])
    for errors in gloo(plan.mesh.world).run(model_workers.parity, name, plan.to_dict(), tied="tied" in name):
        assert errors
        assert {k: v for k, v in errors.items() if not v < 1e-9} == {}


@pytest.mark.parametrize("mesh", few(MORE_MESHES, 3))
def test_every_kind_of_mesh(gloo: Any, mesh: str) -> None:
    plan = made("head norms", MORE_MESHES[mesh])
    for errors in gloo(plan.mesh.world).run(model_workers.parity, "head norms", plan.to_dict()):
        assert {k: v for k, v in errors.items() if not v < 1e-9} == {}


@pytest.mark.parametrize("flags", few([{"fused": True}, {"foreach": True}, {}], 1), ids=["fused", "foreach", "loop"])
@pytest.mark.parametrize("name", few(["qwen3", "llama", "tied"], 1))
def test_training_equals_one_process(gloo: Any, name: str, flags: dict[str, bool]) -> None:
    plan = made(name, MESHES["fsdp x tp"])
    model = build(name, torch.float32)
    plan = make_plan(model, world=4, tp=2, dp_shard=2)
    answers = gloo(4).run(model_workers.training, name, plan.to_dict(), flags)
    assert len({answer["norm"] for answer in answers}) == 1
    for answer in answers:
        assert answer["error"] < 1e-6
        assert answer["alive"] == 0
        assert answer["same group"]
        assert answer["keys"]
    # every size here divides by the mesh, so rank 0's figures are every rank's
    for answer in answers:
        assert answer["parameters"] == plan.memory_bytes["parameters"]
        assert answer["optimizer"] == plan.memory_bytes["optimizer"]


def spoil(data: dict[str, Any], how: str) -> None:
    """Take one fact out of a plan."""
    modules, parameters = data["modules"], data["parameters"]
    if how == "grad_sum":
        next(t for t in parameters.values() if t["grad_sum"])["grad_sum"] = None
    elif how == "enter":
        module = next(m for m in modules.values() if "R->V" in m["inputs"].values())
        module["inputs"], module["share"] = {}, {}
    elif how == "first_rank":
        next(t for t in parameters.values() if t["read"] == "first_rank")["read"] = "local"
    elif how == "reduce":
        next(m for m in modules.values() if m["style"] == "rowwise")["outputs"] = {}


@pytest.mark.parametrize(
    ("name", "how"),
    few(
        [
            *((name, "grad_sum") for name in ("head norms", "qwen3")),
            *((name, "first_rank") for name in ("decoder", "tied")),
            *((name, how) for name in NAMES for how in ("enter", "reduce")),
        ],
        8,
    ),
)
def test_a_spoiled_plan_fails(gloo: Any, name: str, how: str) -> None:
    data = made(name, MESHES["tp 2"]).to_dict()
    spoil(data, how)
    errors = gloo(2).run(model_workers.parity, name, data)[0]
    assert max(errors.values()) > 1e-4
    if how != "reduce" and how != "first_rank":
        assert errors["shape 1 logits"] < 1e-9  # the forward is right: only the gradients tell
