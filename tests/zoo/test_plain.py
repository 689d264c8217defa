"""Plain models of our own: planned and proved like those of transformers, whatever library they come from."""

from __future__ import annotations

import pytest

from zoo.measure import judged, planned
from zoo.plain import PLAIN, plain


@pytest.mark.parametrize("kind", PLAIN)
def test_a_plain_model_is_exact_and_cut(kind: str) -> None:
    model, inputs = plain(kind)
    plan, stages = planned(model, inputs)
    row = judged(kind, model, inputs, plan, stages)
    assert row.verified == "exact", row.proof
    assert row.matmuls == 1.0, row.left
