"""Plan and prove well-known architectures at tp=2 and tp=4: ``make parity``.

A process for each, with a time-out. What is done is kept in ``--results``, so that a broken run goes on where it
stopped; rows that another version of the code found are done again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from page import ROOT, sweep_options, version
from parity_page import page
from zoo.children import Answer, answers, load_all
from zoo.parity import DEGREES, Row, cases, measured


def main() -> None:
    """Measure the named cases, or all that are not done; print a line for each."""
    parser = sweep_options(__doc__, "--cases", "one case at one degree", "parity")
    options = parser.parse_args()

    code = version()
    load_all()
    everything = [_job(case, tp) for case in cases() for tp in DEGREES]
    rows = {_job(r.case, r.tp): r for r in _read(options.results) if options.stale or r.code == code}
    todo = [_job(c, tp) for c in options.cases for tp in DEGREES] or [job for job in everything if job not in rows]
    options.results.parent.mkdir(parents=True, exist_ok=True)
    with options.results.open("a") as file:
        for answer in answers(todo, _measured, workers=options.workers, timeout=options.timeout):
            row = replace(_row(answer), code=code)
            rows[answer.job] = row
            file.write(row.to_json() + "\n")
            file.flush()
            print(_line(row), flush=True)
    if options.write:
        chosen = [rows[job] for job in everything if job in rows]
        (ROOT / "docs" / "parity.md").write_text(page(chosen, len(everything), code))


def _job(case: str, tp: int) -> str:
    return f"{case}|{tp}"


def _measured(job: str) -> Row:
    case, _, tp = job.rpartition("|")
    return measured(case, int(tp))


def _row(answer: Answer) -> Row:
    case, _, tp = answer.job.rpartition("|")
    if answer.fate == "answered":
        row: Row = answer.value
        return row
    return Row(case, int(tp), answer.fate, f"{answer.fate} after {answer.seconds:.0f} s")


def _read(path: Path) -> Iterable[Row]:
    return [Row.from_json(line) for line in path.read_text().splitlines()] if path.exists() else []


def _line(row: Row) -> str:
    what = f"cut {row.cut:.3f} gradients {row.gradients[1]:.1e}" if row.fate == "exact" else row.text[:150]
    return f"{row.case:32s} tp={row.tp} {row.fate:8s} {what}  {row.plan_seconds:.1f} + {row.verify_seconds:.1f} s"


if __name__ == "__main__":
    main()
