"""Plan every transformers type that can be built tiny, prove each plan, hold it beside the hand plan: ``make zoo``.

A process for each type, with a time-out. What is done is kept in ``--results``, so that a broken run goes on where it
stopped; rows that another version of the code found are done again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path

from page import ROOT, sweep_options, version
from rich.console import Console
from rich.progress import Progress
from zoo.children import Answer, answers, load_all
from zoo.classes import plan_types
from zoo.measure import measured
from zoo.popular import POPULAR
from zoo.rows import Row
from zoo_page import page

VERDICTS = ROOT / "tests" / "zoo" / "hand_verdicts.json"


def main() -> None:
    """Measure the named types, or all that are not done; print a line for each."""
    parser = sweep_options(__doc__, "--types", "one type", "zoo")
    parser.add_argument("--no-verify", action="store_true", help="plan only")
    options = parser.parse_args()

    load_all()
    code, planned, verify = version(), set(plan_types()), not options.no_verify
    everything = list(dict.fromkeys([*sorted(planned), *POPULAR]))
    rows = {r.type: r for r in _read(options.results) if options.stale or r.code == code}
    done = {r.type for r in rows.values() if not verify or r.stage != "planned" or r.verified != "not asked"}
    todo = options.types or [t for t in everything if t not in done]
    options.results.parent.mkdir(parents=True, exist_ok=True)
    work = partial(_measured, planned=planned, verify=verify)
    # no thread of rich's own: children are forked from here
    with options.results.open("a") as file, Progress(auto_refresh=False, console=Console()) as progress:
        bar = progress.add_task("zoo", total=len(todo))
        for answer in answers(todo, work, workers=options.workers, timeout=options.timeout):
            row = replace(_row(answer), code=code)
            rows[row.type] = row
            file.write(row.to_json() + "\n")
            file.flush()
            progress.console.print(_line(row), highlight=False, markup=False, soft_wrap=True)
            progress.update(bar, advance=1)
            progress.refresh()
    if options.write:
        verdicts = json.loads(VERDICTS.read_text())
        chosen = [rows[t] for t in everything if t in rows]
        (ROOT / "docs" / "zoo.md").write_text(page(chosen, verdicts, len(everything), code))


def _read(path: Path) -> Iterable[Row]:
    return [Row.from_json(line) for line in path.read_text().splitlines()] if path.exists() else []


def _measured(model_type: str, planned: set[str], verify: bool) -> Row:
    return measured(model_type, verify=verify, hand=model_type in planned)


def _row(answer: Answer) -> Row:
    row = answer.value if answer.fate == "answered" else Row(answer.job, answer.fate)
    return replace(row, seconds=answer.seconds)


def _line(row: Row) -> str:
    hand = row.agreement.verdict if row.agreement else "-"
    if row.stage != "planned":
        return f"{row.type:38s} {row.stage}: {row.error[:120]}"
    shares = f"traced {row.traced:.3f} cut {row.parameters:.3f} matmuls {row.matmuls:.3f}"
    return f"{row.type:38s} {shares} {row.verified:9s} {hand:9s} {row.seconds:6.1f} s"


if __name__ == "__main__":
    main()
