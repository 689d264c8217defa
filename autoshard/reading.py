"""Plans in any of the forms that the public functions take."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autoshard.plans import Plan


def read_plan(plan: Plan | Mapping[str, Any] | str | Path) -> Plan:
    """Return a plan given as itself, as data, or as a path."""
    if isinstance(plan, Plan):
        return plan
    if isinstance(plan, Mapping):
        return Plan.from_dict(plan)
    return Plan.load(plan)
