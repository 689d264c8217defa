"""Plain models of our own: planned and proved like those of transformers, whatever library they come from."""

from __future__ import annotations

import pytest

from zoo.measure import judged, planned
from zoo.plain import PLAIN, plain

#: The least share of the bytes of matmul and convolution weights that is cut.
FLOORS = {
    "conv net": 0.03,
    "resnet": 0.04,
    "vit": 0.94,
    "mixer": 0.92,
    "u-net": 0.41,
    "dit": 0.96,
    "char model": 1.0,
}


def test_every_kind_has_a_floor() -> None:
    assert FLOORS.keys() == PLAIN.keys()


@pytest.mark.parametrize("kind", PLAIN)
def test_a_plain_model_is_exact_and_cut(kind: str) -> None:
    model, inputs = plain(kind)
    plan, stages = planned(model, inputs)
    row = judged(kind, model, inputs, plan, stages)
    assert row.verified == "exact", row.proof
    assert row.matmuls >= FLOORS[kind], row.left
