"""The report says every fact of a plan, in 80 columns, the most important one first."""

from __future__ import annotations

import dataclasses

import pytest
from goldens import check_golden
from sample_plans import decoder_plan, tensor, uncut_plan

from autoshard.diff import differences, render_differences
from autoshard.layout import to_text
from autoshard.plans import Coverage, GradSum, Mesh, Plan, Refusal, Replacement
from autoshard.report import render_passes, render_text
from autoshard.words import counted, fold_names, human_bytes, percent

PLANS = {"decoder": decoder_plan(), "uncut": uncut_plan()}


@pytest.mark.parametrize("name", PLANS)
def test_golden_report(name: str) -> None:
    check_golden(f"report_{name}", render_text(PLANS[name]))


def test_golden_passes() -> None:
    check_golden("report_passes", to_text(render_passes(decoder_plan()), 80))


def test_golden_differences() -> None:
    check_golden("diff", to_text(render_differences(differences(decoder_plan(), uncut_plan())), 80))


def test_replaced_modules_are_shown_and_compared() -> None:
    plan = decoder_plan()
    replacements = (
        Replacement("", "encoder", "no nested tensors"),
        Replacement("layers.{0-3}.self", "attention", "cut by head"),
    )
    changed = dataclasses.replace(plan, replacements=replacements)
    text = render_text(changed)
    assert "Replaced in place" in text and "Replaced in place" not in render_text(plan)
    assert {"(root)", "layers.{0-3}.self", "attention"} <= set(text.replace(",", " ").split())
    found = differences(plan, changed)
    assert [(one.topic, one.name, one.second) for one in found] == [
        ("replaced in place", "(root)", "encoder"),
        *(("replaced in place", f"layers.{n}.self", "attention") for n in range(4)),
    ]


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("width", [60, 80, 120])
def test_fits_the_width_in_ascii(name: str, width: int) -> None:
    text = render_text(PLANS[name], width)
    assert text.isascii()
    assert max(map(len, text.splitlines())) <= width


def test_print_shows_the_report() -> None:
    assert str(decoder_plan()) == render_text(decoder_plan())


def test_does_not_depend_on_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    before = render_text(decoder_plan())
    for name, value in (("COLUMNS", "40"), ("FORCE_COLOR", "1"), ("TERM", "dumb"), ("NO_COLOR", "1")):
        monkeypatch.setenv(name, value)
    assert render_text(decoder_plan()) == before


def test_first_lines_say_mesh_and_coverage() -> None:
    first, second, *_ = render_text(decoder_plan()).splitlines()
    assert first == "Decoder on 8 ranks: dp_replicate=1 dp_shard=4 tp=2"
    assert second == "cut over tp: >99.9% of parameter bytes and 100% of matmul FLOPs"


@pytest.mark.parametrize(
    ("mesh", "said"),
    [
        (Mesh(tp=2), "the 2 ranks of that axis compute the same"),
        (Mesh(dp_shard=2), "parameters are sharded over dp_shard=2 only"),
        (Mesh(dp_replicate=2), "each rank holds the whole model"),
    ],
)
def test_first_line_says_that_nothing_is_cut(mesh: Mesh, said: str) -> None:
    first, second, *_ = render_text(dataclasses.replace(uncut_plan(), mesh=mesh)).splitlines()
    assert first == f"nothing is cut over tp: {said}"
    assert second == f"Decoder on 2 ranks: {mesh}"


def test_long_names_break_and_lose_nothing() -> None:
    name = ".".join(["very_long_module_name"] * 9) + ".weight"
    plan = dataclasses.replace(
        uncut_plan(), parameters={name: tensor((8, 8), None, "because", grad_sum=GradSum(2))}, refused=()
    )
    joined = "".join(line.split()[0] for line in render_text(plan).splitlines() if line.strip())
    assert name in joined


def test_left_whole_is_grouped_by_reason_largest_first() -> None:
    left = (("a.0", 0.1, "small"), ("b", 0.15, "odd"), ("a.1", 0.1, "small"))
    plan = dataclasses.replace(decoder_plan(), coverage=Coverage(0.65, 0.5, left))
    lines = [line.split() for line in render_text(plan).splitlines()]
    rows = [line for line in lines if line and line[0] in ("20.0%", "15.0%")]
    assert rows == [["20.0%", "a.{0-1}", "small"], ["15.0%", "b", "odd"]]


def test_says_how_many_names_it_does_not_show() -> None:
    left = tuple((f"part_{letter}", 0.01, "odd") for letter in "abcdefgh")
    text = render_text(dataclasses.replace(decoder_plan(), coverage=Coverage(0.9, 0.9, left)))
    assert "part_e" in text and "part_f" not in text
    assert "(3 more: see --json)" in text


def test_parts_copies_and_partial_rows_are_shown() -> None:
    fused = tensor((12, 4), 0, "fused", tp_parts=((0, 8), (8, 4)), tp_copies=2)
    whole = tensor((6,), None, "used by each rank in part", grad_sum=GradSum(4, ((2, 4),)))
    text = render_text(dataclasses.replace(decoder_plan(), parameters={"fused.weight": fused, "scale": whole}))
    assert "weight dim 0 in 2 parts on 2 ranks each" in text
    sliced = tensor((12, 4), None, "k and v whole", read="slice", slices=((0, 8, 2), (8, 4, 1)), slice_dim=0)
    text_of_slices = render_text(dataclasses.replace(decoder_plan(), parameters={"fused.weight": sliced}))
    assert "weight dim 0 read in 2 slices" in text_of_slices
    assert "sum over 4 tp ranks for rows 2-5" in text


def test_refusals_name_file_and_line() -> None:
    plan = dataclasses.replace(decoder_plan(), refused=(Refusal("a.b", "model.py:12", "data-dependent [index]"),))
    text = render_text(plan)
    assert "model.py:12" in text and "data-dependent [index]" in text


def test_a_bare_plan_renders() -> None:
    bare = Plan(Mesh(), {}, {}, {}, (), {}, (), Coverage(0, 0))
    assert render_text(bare).startswith("nothing is cut over tp: each rank holds the whole model\nthe model on 1 rank")


def test_passes_of_a_stored_plan() -> None:
    assert "keeps no times" in to_text(render_passes(Plan.from_dict(decoder_plan().to_dict())), 80)


def test_equal_plans_do_not_differ() -> None:
    assert differences(decoder_plan(), decoder_plan()) == []


def test_difference_shows_only_what_changed() -> None:
    plan = decoder_plan()
    weight = dataclasses.replace(plan.parameters["head.weight"], tp_dim=1)
    changed = dataclasses.replace(plan, parameters={**plan.parameters, "head.weight": weight})
    (found,) = differences(plan, changed)
    assert (found.topic, found.name, found.first, found.second) == ("parameters", "head.weight", "tp dim 0", "tp dim 1")


def test_every_field_of_a_tensor_is_compared() -> None:
    plan = decoder_plan()
    changes = {
        "shape": (1, 1),
        "dtype": "float64",
        "tp_dim": 1,
        "tp_parts": ((0, 1),),
        "tp_copies": 2,
        "grad_sum": GradSum(2),
        "fsdp_dim": 1,
        "read": "first_rank",
        "trainable": False,
        "tied_to": "embed.weight",
        "slices": ((0, 1, 2),),
    }
    for name, value in changes.items():
        weight = dataclasses.replace(plan.parameters["head.weight"], **{name: value})  # type: ignore[arg-type]
        assert differences(plan, dataclasses.replace(plan, parameters={**plan.parameters, "head.weight": weight})), name


def test_fold_names() -> None:
    assert fold_names(["a.0.x", "a.0.y", "a.1.x", "a.1.y", "b"]) == ["a.{0-1}.x", "a.{0-1}.y", "b"]
    assert fold_names(["a.{0-1}.x", "a.3.x"]) == ["a.{0-1,3}.x"]
    assert fold_names([f"a.{i}.e.{j}" for i in range(2) for j in range(3)]) == ["a.{0-1}.e.{0-2}"]
    assert fold_names(["", "a", "a.0", "a.up"]) == ["", "a", "a.0", "a.up"]
    assert fold_names([]) == []


def test_words() -> None:
    assert [human_bytes(size) for size in (0, 1023, 1024, (1 << 20) - 1, 3 << 29)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "1.0 MiB",
        "1.5 GiB",
    ]
    assert [percent(share) for share in (0, 0.0001, 0.5, 0.99999, 1)] == ["0%", "<0.1%", "50.0%", ">99.9%", "100%"]
    assert [counted(number, "rank") for number in (1, 2, 16384)] == ["1 rank", "2 ranks", "16,384 ranks"]
