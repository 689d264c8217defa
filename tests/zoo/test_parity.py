"""The rows and the page of ``make parity`` say what was found."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from pathlib import Path

import pytest

from autoshard.pipeline import Options, run
from zoo.parity import Row, cases, measured, proved
from zoo.tiny import tiny

ROWS = (
    Row("good", 2, "exact", "", 0.99, 0.51, (2, 1e-16), 0.0, (20, 2e-15), 1.5, 2.5, "", "now"),
    Row("good", 4, "exact", "", 0.98, 0.26, (1, 3e-16), None, (20, 1e-15), 0.5, 2.5, "", "now"),
    Row("bad", 2, "wrong", "entry a | b: no", 0.9, 0.6, (1, 0.1), None, (20, 0.3), 1.0, 2.0, "", "now"),
    Row("stuck", 2, "no plan", "TraceError: no", code="now"),
)


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    found: Callable[..., str] = importlib.import_module("parity_page").page
    return found


def test_totals_come_first_and_every_failure_has_its_text(page: Callable[..., str]) -> None:
    text = page(ROWS, 4, "now")
    lines = text.splitlines()
    for line in (
        "| models | 3 |",
        "| made | 3 of 4 |",
        "| exact: every output, loss and gradient | 2 of 4 |",
        "| outputs compared | 3 |",
        "| losses compared | 1 |",
        "| gradients compared | 40 |",
        "| largest error among the exact | 2e-15 |",
        "| bad, tp=2 | wrong | entry a \\| b: no |",
        "| stuck, tp=2 | no plan | TraceError: no |",
        "| good | 2 | exact | 0.990 | 0.510 | 2: 1e-16 | 0 | 20: 2e-15 | 1.5 |",
        "| good | 4 | exact | 0.980 | 0.260 | 1: 3e-16 |  | 20: 1e-15 | 0.5 |",
    ):
        assert line in lines, line
    assert text.index("| what | here |") < text.index("## What is not exact") < text.index("## All")
    assert "**" not in text


def test_a_page_of_a_part_or_of_other_code_says_so(page: Callable[..., str]) -> None:
    text = page(ROWS, 6, "later")
    assert "**2 of 6 plans not measured**" in text
    assert "**4 rows found by another version of the code**" in text


def test_rows_are_read_as_they_were_written() -> None:
    assert tuple(Row.from_json(row.to_json()) for row in ROWS) == ROWS


def test_the_list_is_whole() -> None:
    names = cases()
    assert len([name for name in names if name.startswith("llama")]) == 5
    assert {"mistral", "bert", "bart", "whisper", "mamba", "falcon", "own decoder, every name random"} <= set(names)
    assert len(names) in (31, 32)  # the real one where its package is installed


@pytest.mark.parametrize("case", ["own decoder, every name random", "llama, 7 heads"])
def test_a_case_is_planned_and_exact(case: str) -> None:
    row = measured(case, 4)
    assert row.fate == "exact", row.text
    assert row.gradients[0] > 10
    assert 0.25 <= row.held < 1
    assert row.cut > 0.9
    assert (row.loss is not None) == case.startswith("llama")


def test_a_spoiled_plan_is_no_exact_row() -> None:
    model, inputs = tiny("llama")
    plan, _ = run(model, Options(world=2, tp=2, example_inputs=inputs))
    modules = {fqn: dataclasses.replace(module, inputs={}, share={}) for fqn, module in plan.modules.items()}
    row = proved(Row("spoiled", 2, ""), model, dataclasses.replace(plan, modules=modules), inputs)
    assert row.fate == "wrong"
    assert "entry" in row.text
    assert row.gradients[1] > 1e-3


def test_what_raises_is_a_row_with_its_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zoo.parity.run", lambda *args: 1 / 0)
    row = measured("gpt2", 2)
    assert (row.fate, row.text) == ("no plan", "ZeroDivisionError: division by zero")
