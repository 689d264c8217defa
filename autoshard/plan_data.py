"""From plain data, as JSON holds it, to a plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autoshard.plans import (
    Collective,
    Coverage,
    GradSum,
    Mesh,
    MeshChoice,
    ModulePlan,
    Parts,
    Plan,
    Refusal,
    Replacement,
    Slices,
    TensorPlan,
    Unit,
    Workload,
)
from autoshard.rewrite.record import call_rewrite


def _parts(value: Any) -> Parts | None:
    return None if value is None else tuple((int(offset), int(length)) for offset, length in value)


def _slices(value: Any) -> Slices | None:
    return None if value is None else tuple((int(offset), int(length), int(ways)) for offset, length, ways in value)


def _tensor(data: dict[str, Any]) -> TensorPlan:
    grad = data["grad_sum"]
    return TensorPlan(
        **{
            **data,
            "shape": tuple(data["shape"]),
            "local_shape": tuple(data["local_shape"]),
            "tp_parts": _parts(data["tp_parts"]),
            # plans of before there were any do not have the key
            "slices": _slices(data.get("slices")),
            "grad_sum": None if grad is None else GradSum(grad["ranks"], _parts(grad.get("parts"))),
        }
    )


def module_plan(data: Mapping[str, Any]) -> ModulePlan:
    """Read a module's plan from plain data."""
    return ModulePlan(**{**data, "rewrites": tuple(map(call_rewrite, data.get("rewrites", ())))})


def plan_of(data: dict[str, Any]) -> Plan:
    """Return the plan that ``Plan.to_dict`` gave as plain data."""
    return Plan(
        **{
            **data,
            "mesh": Mesh(**data["mesh"]),
            "parameters": {k: _tensor(v) for k, v in data["parameters"].items()},
            "buffers": {k: _tensor(v) for k, v in data["buffers"].items()},
            "modules": {k: module_plan(v) for k, v in data["modules"].items()},
            "units": tuple(Unit(**v) for v in data["units"]),
            "collectives": tuple(Collective(**v) for v in data["collectives"]),
            "coverage": Coverage(
                **{**data["coverage"], "left": tuple((a, b, c) for a, b, c in data["coverage"]["left"])}
            ),
            "workload": Workload(**data["workload"]),
            "meshes": tuple(MeshChoice(**{**v, "mesh": Mesh(**v["mesh"])}) for v in data["meshes"]),
            "assumptions": tuple(data["assumptions"]),
            "warnings": tuple(data["warnings"]),
            "refused": tuple(Refusal(**v) for v in data["refused"]),
            # plans of before there were any do not have the key
            "replacements": tuple(Replacement(**v) for v in data.get("replacements", ())),
        }
    )
