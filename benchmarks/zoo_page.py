"""Write what the sweep over the zoo found as a page for readers."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import transformers
from page import table
from zoo.rows import Row

_HEAD = """\
# The zoo

Made by `make zoo` with torch {torch} and transformers {transformers} on CPUs{stale}.

Each of {total} types of transformers is built tiny and random, planned at tp=2 from its data flow alone, and the plan
is verified: two ranks are simulated, and every output and the gradient of every parameter is compared with the
untouched model in float64.

"""

_RULES = """\
A plan agrees with a hand plan as far as the dims go that each cuts of each parameter. *Same*: the same dims, and no
more bytes moved. *Better*: the same parameters with fewer bytes moved, or a superset with no more bytes moved per byte
cut; or a superset that is made again with all that the hand plan leaves whole kept whole, and then moves no more than
the hand plan. *Worse*: fewer parameters, or the same with more bytes moved. *Different*: anything else. Bytes moved are
those of the conversions of activations, forward and backward, on the traced graph; modules that take one value in count
it once, for both plans.
"""


def page(rows: Sequence[Row], verdicts: Mapping[str, Mapping[str, Any]], everything: int, code: str) -> str:
    """Return the page.

    Args:
        rows: one for each type that was measured.
        verdicts: what is known of each hand plan: ``right``, or what is wrong.
        everything: how many types there are.
        code: the version of the code at hand; rows of another are said.
    """
    right = {t for t, entry in verdicts.items() if entry["verdict"] == "right"}
    stale = sum(row.code != code for row in rows)
    notes = [f"{everything - len(rows)} of {everything} types not measured"] * (len(rows) < everything)
    notes += [f"{stale} rows found by another version of the code"] * (stale > 0)
    head = _HEAD.format(
        torch=torch.__version__.partition("+")[0],
        transformers=transformers.__version__,
        total=len(rows),
        stale="".join(f"; **{note}**" for note in notes),
    )
    parts = [
        head + _totals(rows, right, verdicts),
        "## How much is cut\n\n" + _histogram(rows, verdicts),
        "## Agreement with hand plans\n\n" + _RULES + "\n" + _partings(rows, right),
        "## Hand plans that are wrong\n\nWhat is inferred instead:\n\n" + _wrong_hands(rows, right, verdicts),
        "## Not reached\n\n" + _not_reached(rows),
        "## Not in the trace\n\n" + _untraced(rows),
        "## Weights of matmuls left whole\n\nThe share is of the model's parameter bytes.\n\n" + _left(rows),
        "## All types\n\n" + _all(rows, right, verdicts),
    ]
    return "\n".join(parts)


def _totals(rows: Sequence[Row], right: set[str], verdicts: Mapping[str, Any]) -> str:
    running = [r for r in rows if r.stage != "not run"]
    planned = [r for r in rows if r.stage == "planned"]
    agreeing = [r for r in running if r.type in right]
    good = [r for r in agreeing if r.agreement and r.agreement.verdict in ("same", "better")]
    others = [r for r in running if r.type in verdicts and r.type not in right]
    free = [r for r in planned if r.type not in verdicts]
    high = [r for r in free if r.matmuls >= 0.95]
    mean = sum(r.matmuls for r in free) / max(1, len(free))
    exact = [r for r in planned if r.verified == "exact"]
    lines = [
        ("types whose forward runs", "", str(len(running))),
        ("of them, get a plan", "100 %", _of(planned, running)),
        ("of them, every module traced", "", _of([r for r in planned if not r.opaque], running)),
        ("of them, every parameter in the trace", "", _of([r for r in planned if r.traced > 0.9999], running)),
        ("plans that are exact, gradients included", "", _of(exact, planned)),
        ("right hand plans: same or better", "97 %", _of(good, agreeing)),
        ("wrong hand plans: the inferred plan is exact", "all", _of([r for r in others if r in exact], others)),
        ("without a hand plan: mean share of traced matmul bytes cut", "", f"{mean:.3f} over {len(free)}"),
        ("without a hand plan: types with a share of 0.95 or more", "", _of(high, free)),
    ]
    return table(("what", "target", "here"), lines) + "\n"


def _of(some: Sequence[Row], every: Sequence[Row]) -> str:
    share = f" ({100 * len(some) / len(every):.1f} %)" if every else ""
    return f"{len(some)} of {len(every)}{share}"


def _histogram(rows: Iterable[Row], verdicts: Mapping[str, Any]) -> str:
    counts = {kind: Counter[int]() for kind in ("hand parameters", "hand matmuls", "free parameters", "free matmuls")}
    for row in rows:
        if row.stage == "planned":
            kind = "hand" if row.type in verdicts else "free"
            counts[f"{kind} parameters"][_tenth(row.parameters)] += 1
            counts[f"{kind} matmuls"][_tenth(row.matmuls)] += 1
    lines = [
        (f"{low / 10:.1f} to {(low + 1) / 10:.1f}", *(counts[kind][low] or "" for kind in counts))
        for low in reversed(range(10))
    ]
    titles = ("share of bytes cut", "hand plan: parameters", "matmul weights", "none: parameters", "matmul weights")
    return table(titles, lines) + "\n"


def _tenth(share: float) -> int:
    return min(9, int(share * 10 + 1e-9))


def _partings(rows: Iterable[Row], right: set[str]) -> str:
    held = [r for r in rows if r.agreement and r.type in right]
    counts = Counter(r.agreement.verdict for r in held if r.agreement)
    total = ", ".join(f"{counts[verdict]} {verdict}" for verdict in ("same", "better", "worse", "different"))
    lines = [
        (f"`{r.type}`", r.agreement.verdict, _cell(r.agreement.why))
        for r in held
        if r.agreement and r.agreement.verdict in ("worse", "different")
    ]
    return (
        f"Of {len(held)} right hand plans: {total}.\n\n"
        + table(("type", "verdict", "what differs, and why"), lines)
        + "\n"
    )


def _wrong_hands(rows: Iterable[Row], right: set[str], verdicts: Mapping[str, Mapping[str, Any]]) -> str:
    lines = [
        (f"`{r.type}`", _cell(_entry(verdicts[r.type])), r.stage, r.verified, f"{r.matmuls:.3f}")
        for r in rows
        if r.type in verdicts and r.type not in right
    ]
    return table(("type", "the hand plan", "here", "verified", "share of matmul bytes cut"), lines) + "\n"


def _entry(entry: Mapping[str, Any]) -> str:
    return f"{entry['verdict']}: {entry['why']}" if entry.get("why") else str(entry["verdict"])


def _not_reached(rows: Iterable[Row]) -> str:
    lines = [
        (f"`{r.type}`", r.stage if r.stage != "planned" else f"verified: {r.verified}", _cell(r.error or r.proof))
        for r in rows
        if r.stage != "planned" or r.verified != "exact"
    ]
    return (table(("type", "how far", "why"), lines) if lines else "Every type was planned and is exact.") + "\n"


def _untraced(rows: Sequence[Row]) -> str:
    """Return the modules whose code could not be traced, then the parameters that no trace uses."""
    opaque = [(f"`{r.type}`", _cell("; ".join(r.opaque))) for r in rows if r.opaque]
    unused = [
        (f"`{r.type}`", f"`{left.pattern}`", f"{left.share:.3f}", _cell(left.why))
        for r in rows
        for left in sorted(r.untraced, key=lambda each: -each.share)
        if left.share >= 0.001
    ]
    modules = table(("type", "modules whose own code is not traced"), opaque)
    return f"{modules}\n\n{table(('type', 'parameters', 'share', 'why'), unused)}\n"


def _left(rows: Iterable[Row]) -> str:
    """Return the weights by reason, most bytes first; those of one reason, largest first."""
    grouped: dict[str, list[tuple[float, str]]] = defaultdict(list)
    for row in rows:
        for left in row.left:
            grouped[left.why].append((left.share, f"{row.type}: `{left.pattern}` {left.share:.3f}"))
    order = sorted(grouped, key=lambda why: -sum(share for share, _ in grouped[why]))
    lines = [(_cell(why), "; ".join(text for _, text in sorted(grouped[why], reverse=True))) for why in order]
    return table(("why", "weights"), lines) + "\n"


def _all(rows: Sequence[Row], right: set[str], verdicts: Mapping[str, Any]) -> str:
    lines = []
    for r in sorted(rows, key=lambda each: each.type):
        known = "right" if r.type in right else "wrong" if r.type in verdicts else "none"
        hand = f"{known}: {r.agreement.verdict}" if r.agreement and r.type in right else known
        unknown = ", ".join(f"{op} x{uses}" for op, uses in r.unknown)
        shares = [f"{share:.3f}" for share in (r.traced, r.parameters, r.matmuls)] if r.stage == "planned" else [""] * 3
        how = "in part" if r.opaque else "whole" if r.stage == "planned" else r.stage
        lines.append((f"`{r.type}`", how, *shares, unknown, r.verified, hand))
    titles = ("type", "traced", "bytes in the trace", "bytes cut", "matmul bytes cut", "ops without a rule", "verified")
    return table((*titles, "hand plan"), lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
