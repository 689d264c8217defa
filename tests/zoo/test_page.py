"""The page of the sweep says what the rows say."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path

import pytest

from zoo.rows import Agreement, Left, Row

VERDICTS = {
    "good": {"verdict": "right"},
    "missed": {"verdict": "right"},
    "broken": {"verdict": "gradients wrong", "why": "no sum"},
}
ROWS = (
    Row("good", "planned", "", 1.0, 1.0, 1.0, verified="exact", agreement=Agreement("same", "", 1, 1, 1, 1)),
    Row("missed", "planned", "", 1.0, 0.5, 0.5, verified="exact", agreement=Agreement("worse", "a | b", 1, 2, 1, 1)),
    Row("broken", "planned", "", 1.0, 0.9, 0.95, verified="wrong", proof="off", agreement=None),
    Row("free", "planned", "", 0.8, 0.7, 0.95, left=(Left("x.weight", 0.2, "a norm"),), opaque=("m: it branches",)),
    Row("stuck", "no plan", "TraceError: no"),
    Row("dead", "not run", "KeyError"),
)


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    found: Callable[..., str] = importlib.import_module("zoo_page").page
    return found


def test_totals_count_what_they_say(page: Callable[..., str]) -> None:
    text = page(ROWS, VERDICTS, 6, "")
    for line in (
        "| types whose forward runs |  | 5 |",
        "| of them, get a plan | 100 % | 4 of 5 (80.0 %) |",
        "| of them, every module traced |  | 3 of 5 (60.0 %) |",
        "| plans that are exact, gradients included |  | 2 of 4 (50.0 %) |",
        "| right hand plans: same or better | 97 % | 1 of 2 (50.0 %) |",
        "| wrong hand plans: the inferred plan is exact | all | 0 of 1 (0.0 %) |",
        "| without a hand plan: mean share of traced matmul bytes cut |  | 0.950 over 1 |",
        "| without a hand plan: types with a share of 0.95 or more |  | 1 of 1 (100.0 %) |",
        "| `missed` | worse | a \\| b |",
        "| `broken` | gradients wrong: no sum | planned | wrong | 0.950 |",
        "| `stuck` | no plan | TraceError: no |",
        "| `free` | m: it branches |",
        "| a norm | free: `x.weight` 0.200 |",
    ):
        assert line in text.splitlines(), line
    assert "**" not in text


def test_a_page_of_part_of_the_types_or_of_other_code_says_so(page: Callable[..., str]) -> None:
    text = page(ROWS, VERDICTS, 9, "now")
    assert "**3 of 9 types not measured**" in text
    assert "**6 rows found by another version of the code**" in text
