"""Plans round-trip through JSON, fold and unfold, and refuse what is not a plan."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_plans import decoder_plan, uncut_plan

from autoshard.errors import InvalidArgument
from autoshard.patterns import fold, unfold
from autoshard.plans import GradSum, Mesh, ModulePlan, PassTime, Plan, Replacement, Unit


@pytest.mark.parametrize("plan", [decoder_plan(), uncut_plan()])
def test_round_trip(plan: Plan, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    assert Plan.from_dict(json.loads(plan.to_json())).to_json() == plan.to_json()


degree = st.integers(1, 64)
size = st.integers(0, 1 << 50)
text = st.text(max_size=12)
spans = st.lists(st.tuples(size, size), max_size=3).map(tuple)


@settings(deadline=None)  # a loaded machine is no failure
@given(degree, degree, degree, st.one_of(st.none(), spans), st.one_of(st.none(), spans), text, size)
def test_any_plan_round_trips(
    replicate: int,
    shard: int,
    tp: int,
    parts: tuple[tuple[int, int], ...] | None,
    summed: tuple[tuple[int, int], ...] | None,
    why: str,
    size_bytes: int,
) -> None:
    plan = decoder_plan()
    weight = dataclasses.replace(plan.parameters["head.weight"], tp_parts=parts, grad_sum=GradSum(tp, summed), why=why)
    changed = dataclasses.replace(
        plan,
        mesh=Mesh(replicate, shard, tp),
        parameters={**plan.parameters, why: weight},
        memory_bytes={why: size_bytes},
        why_mesh=why,
    )
    assert Plan.from_dict(json.loads(changed.to_json())) == changed
    assert changed.mesh.world == replicate * shard * tp
    assert changed.mesh.data * tp == changed.mesh.world


def test_replacements_round_trip_and_may_be_missing() -> None:
    plan = dataclasses.replace(
        decoder_plan(), replacements=(Replacement("layers.{0-3}.attention", "attention", "its heads"),)
    )
    data = json.loads(plan.to_json())
    assert Plan.from_dict(data) == plan
    del data["replacements"]  # a plan of before there were any
    assert Plan.from_dict(data) == decoder_plan()


def test_times_are_not_stored() -> None:
    plan = decoder_plan()
    slower = dataclasses.replace(plan, times=(PassTime("trace", 99.0, ""),))
    assert slower == plan
    assert slower.to_json() == plan.to_json()


@settings(deadline=None)
@given(st.sets(st.integers(0, 200), min_size=1).map(sorted))
def test_unfold_undoes_fold(numbers: list[int]) -> None:
    assert unfold(f"a.{fold(numbers)}.b") == [f"a.{number}.b" for number in numbers]


def test_a_name_unfolds_to_itself() -> None:
    assert unfold("layers.3.up") == ["layers.3.up"]
    assert unfold("") == [""]


def test_module_plans_share_within_their_own_layer() -> None:
    shared = ModulePlan("colwise", {"x": "R->V"}, {}, "", {"x": "layers.{0-1,3}.enter"})
    plan = dataclasses.replace(decoder_plan(), modules={"layers.{0-1,3}.query": shared})
    assert [(fqn, module.share["x"]) for fqn, module in plan.module_plans()] == [
        (f"layers.{layer}.query", f"layers.{layer}.enter") for layer in (0, 1, 3)
    ]


def test_unit_modules_in_order() -> None:
    plan = dataclasses.replace(decoder_plan(), units=(Unit("layers.{0-2}", 1, 1), Unit("", 1, 1)))
    assert plan.unit_modules() == ["layers.0", "layers.1", "layers.2", ""]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"schema_version": 99}, "schema_version 99"),
        ({"mesh": {"dp": 2}}, "not well formed"),
        ({"parameters": None}, "not well formed"),
        ({"colour": "red"}, "not well formed"),
        ({"units": [{"module": "x"}]}, "not well formed"),
    ],
)
def test_refuses_what_is_not_a_plan(change: dict[str, object], said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        Plan.from_dict({**decoder_plan().to_dict(), **change})


@pytest.mark.parametrize("content", [None, "", "[]", "{}", "not json"])
def test_refuses_a_file_that_is_no_plan(content: str | None, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(InvalidArgument):
        Plan.load(path)
