"""What `explain` shows of real plans, whole, at 80 columns."""

from __future__ import annotations

from pathlib import Path

import pytest
from goldens import check_golden

from autoshard.api import plan as make_plan
from autoshard.report import render_text
from autoshard.targets import load_model

EXAMPLES = Path(__file__).parents[2] / "examples"
TARGETS = {
    "decoder": ("decoder.py", 2),
    "mlp": ("mlp.py", 2),
    "llama3_8b": ("llama3_8b.json", 8),
    "qwen3_8b": ("configs/qwen3_8b.json", 4),
    "mistral_7b": ("configs/mistral_7b.json", 4),
}


@pytest.mark.parametrize("name", TARGETS)
def test_golden_explanation(name: str) -> None:
    target, tp = TARGETS[name]
    plan = make_plan(load_model(str(EXAMPLES / target)), world=8, tp=tp, batch=1, sequence=4096)
    text = render_text(plan)
    assert max(map(len, text.splitlines())) <= 80
    check_golden(f"explain_{name}", text)
