"""Pieces of a fused parameter keep their ends when the model under proof is narrower."""

from __future__ import annotations

import dataclasses

import pytest
from sample_plans import tensor
from torch import nn

from autoshard.errors import InvalidArgument
from autoshard.passes.factors import Factor, concatenation, product
from autoshard.plans import Coverage, Mesh, Plan, TensorPlan
from autoshard.proving.smaller import Smaller, bounds
from autoshard.proving.specimen import Specimen, fit


def plan_of(weight: TensorPlan) -> Plan:
    return Plan(Mesh(1, 1, 2), {"weight": weight}, {}, {}, (), {}, (), Coverage(0.0, 0.0))


def test_parts_of_a_concatenation() -> None:
    heads, width, rest = Factor(8), Factor(4), Factor(6)
    fused = concatenation([product([heads, width]), product([heads, width]), rest])
    assert bounds(fused, {}) == {0: 0, 32: 32, 64: 64, 70: 70} | {n: n for n in range(0, 65, 4)}
    assert bounds(fused, {heads: 2}) == {0: 0, 32: 8, 64: 16, 70: 22}
    assert bounds(fused, {width: 1})[64] == 16


def test_a_product_whose_major_factor_stays_repeats_its_parts() -> None:
    groups, inner, other = Factor(2), Factor(8), Factor(4)
    fused = product([groups, concatenation([inner, other])])
    assert bounds(fused, {inner: 2}) == {0: 0, 8: 2, 12: 6, 20: 8, 24: 12}
    assert bounds(fused, {groups: 1}) == {0: 0, 24: 12}


def specimen() -> Specimen:
    return Specimen(
        nn.Linear(4, 22, bias=False), Smaller(bounds={"weight": [{0: 0, 32: 8, 64: 16, 70: 22}, {0: 0, 4: 4}]})
    )


@pytest.mark.parametrize("pieces", [((0, 32), (32, 32), (64, 6))])
def test_a_plan_is_fitted(pieces: tuple[tuple[int, int], ...]) -> None:
    weight = tensor((70, 4), 0, "", tp_parts=pieces)
    fitted = fit(plan_of(weight), specimen()).parameters["weight"]
    assert (fitted.shape, fitted.tp_parts) == ((22, 4), ((0, 8), (8, 8), (16, 6)))
    ways = tuple((*piece, 2) for piece in pieces)
    sliced = dataclasses.replace(weight, tp_dim=None, tp_parts=None, read="slice", slices=ways, slice_dim=0)
    assert fit(plan_of(sliced), specimen()).parameters["weight"].slices == ((0, 8, 2), (8, 8, 2), (16, 6, 2))


def test_a_piece_that_ends_elsewhere_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="does not end where a part of it does"):
        fit(plan_of(tensor((70, 4), 0, "", tp_parts=((0, 30), (30, 40)))), specimen())
