"""torch's own transformer layers under a plan on real processes: gradients, and training with an optimizer."""

from __future__ import annotations

from typing import Any

import model_workers
import pytest
import replace_workers
import torch
from models import build
from rows import few

from autoshard.api import plan as make_plan
from autoshard.plans import Plan

MESHES = {
    "tp 2": {"world": 2, "tp": 2},
    "fsdp x tp": {"world": 4, "tp": 2, "dp_shard": 2},
}


def made(name: str, degrees: dict[str, int], dtype: torch.dtype = torch.float64) -> Plan:
    plan = make_plan(build(name, dtype), example_inputs=(torch.zeros(2, 7, dtype=torch.long),), **degrees)  # type: ignore[arg-type]
    assert any(one.kind == "attention" for one in plan.replacements)
    return plan


@pytest.mark.parametrize("name", ["torch encoder", "torch transformer"])
@pytest.mark.parametrize("mesh", few(MESHES, 1))
def test_gradients_equal_one_process(gloo: Any, name: str, mesh: str) -> None:
    plan = made(name, MESHES[mesh])
    for errors in gloo(plan.mesh.world).run(model_workers.parity, name, plan.to_dict()):
        assert errors
        assert {k: v for k, v in errors.items() if not v < 1e-9} == {}


def test_training_equals_one_process(gloo: Any) -> None:
    plan = made("torch encoder", MESHES["fsdp x tp"], torch.float32)
    for answer in gloo(4).run(model_workers.training, "torch encoder", plan.to_dict(), {}):
        assert answer["error"] < 1e-6
        assert answer["alive"] == 0
        assert answer["keys"]


def test_compiled_and_recomputed(gloo: Any) -> None:
    plan = made("torch encoder", MESHES["tp 2"])
    for errors in gloo(2).run(replace_workers.compiled, "torch encoder", plan.to_dict()):
        assert {k: v for k, v in errors.items() if not v < 1e-9} == {}


@pytest.mark.parametrize("mesh", MESHES)
def test_names_and_values_stay(gloo: Any, mesh: str) -> None:
    plan = made("torch transformer", MESHES[mesh])
    assert all(gloo(plan.mesh.world).run(replace_workers.keys_and_values, "torch transformer", plan.to_dict()))
