"""Modules with rewritten calls under a plan on real processes: gradients, FSDP, compilation and recomputation."""

from __future__ import annotations

from typing import Any

import model_workers
import pytest
import replace_workers
import torch
from models import build

from autoshard.api import plan as make_plan
from autoshard.plans import Plan

MESHES = {
    "tp 2": {"world": 2, "tp": 2},
    "fsdp x tp": {"world": 4, "tp": 2, "dp_shard": 2},
}


def made(degrees: dict[str, int]) -> Plan:
    plan = make_plan(build("nano"), example_inputs=(torch.zeros(2, 7, dtype=torch.long),), **degrees)  # type: ignore[arg-type]
    rewritten = {fqn for fqn, module in plan.module_plans() if module.rewrites}
    assert rewritten == {f"blocks.{i}" for i in range(6)}
    return plan


@pytest.mark.parametrize("mesh", MESHES)
def test_gradients_equal_one_process(gloo: Any, mesh: str) -> None:
    plan = made(MESHES[mesh])
    for errors in gloo(plan.mesh.world).run(model_workers.parity, "nano", plan.to_dict()):
        assert errors
        assert {k: v for k, v in errors.items() if not v < 1e-9} == {}


def test_compiled_and_recomputed(gloo: Any) -> None:
    plan = made(MESHES["tp 2"])
    for errors in gloo(2).run(replace_workers.compiled, "nano", plan.to_dict()):
        assert {k: v for k, v in errors.items() if not v < 1e-9} == {}
