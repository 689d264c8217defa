"""Write what the sweep over transformers' hand plans found as a page for readers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Row = dict[str, Any]

_VERDICTS = Path(__file__).resolve().parents[1] / "tests" / "zoo" / "hand_verdicts.json"
_SAYS = {"right": "right", "wrong": "**wrong**", "none": "nothing to compare", "later": "not applicable yet"}

_HEAD = """\
# transformers' hand plans, verified

Made by `python benchmarks/hand_plans.py --gloo --write` with torch 2.13.0 and transformers 5.24.0 on CPUs.

Each of the {total} model types of transformers that has a tensor-parallel plan of its own is built tiny and random, in
its default state but for its sizes and without a cache. Its `model.tp_plan` is given to `autoshard.verify` at tp=2: the
executor applies what the style names mean on two simulated ranks, and every output and the gradient of every parameter
is compared with the untouched model in float64, on two batches, the second accumulated on the first.

The reference is a check with transformers' own code on two gloo processes (float32, one backward), made
independently.

| | plans |
|---|---:|
{counts}

On two gloo processes the executor's verdict was the same for {same} of {sampled} sampled plans.

What this does not say: transformers' own executor may fail where the meaning of a plan is right. Its
`replicated_with_grad_allreduce` sums an accumulated gradient again on every backward, which our executor does not.
A row-cut table that does more than look rows up (it norms them, or writes others over them) is called wrong for that:
the style says that the ranks' answers add up, and they do only by how our executor masks them.
Expert-parallel plans (`model.ep_plan`) cannot be applied yet and are not part of this.
"""


def page(rows: list[Row]) -> str:
    """Return the page; ``rows`` are the results of both kinds, one for each type."""
    reference = json.loads(_VERDICTS.read_text())
    simulated = {row["type"]: row for row in rows if row["how"] == "simulated" and row["type"] in reference}
    gloo = {row["type"]: row for row in rows if row["how"] == "gloo"}
    parts = [_head(simulated, gloo, reference)]
    differing = [t for t, row in simulated.items() if row["verdict"] != _wanted(reference[t])]
    wrong = [t for t, row in simulated.items() if row["verdict"] == "wrong"]
    if differing:
        parts.append("## Where the two differ\n\n" + _table(sorted(differing), simulated, reference, gloo))
    parts.append("## Wrong\n\n" + _table(sorted(set(wrong) - set(differing)), simulated, reference, gloo))
    right = [t for t, row in sorted(simulated.items()) if row["verdict"] == "right" and t not in differing]
    parts.append(f"## Right\n\n{_wrapped(', '.join(f'`{t}`' for t in right))}\n")
    parts.append(f"## The sample on two processes\n\n{_wrapped(', '.join(f'`{t}`' for t in sorted(gloo)))}\n")
    return "\n".join(parts)


def _head(simulated: dict[str, Row], gloo: dict[str, Row], reference: dict[str, Row]) -> str:
    counts: dict[tuple[str, str], int] = {}
    for model_type, row in simulated.items():
        key = (row["verdict"], reference[model_type]["verdict"])
        counts[key] = counts.get(key, 0) + 1
    lines = [f"| here {_says(ours)}, reference {theirs} | {n} |" for (ours, theirs), n in sorted(counts.items())]
    same = sum(row["verdict"] == simulated.get(t, {}).get("verdict") for t, row in gloo.items())
    return _HEAD.format(total=len(simulated), counts="\n".join(lines), same=same, sampled=len(gloo))


def _wanted(entry: Row) -> str:
    return "right" if entry["verdict"] == "right" else "wrong"


def _says(verdict: str) -> str:
    return _SAYS.get(verdict, verdict).strip("*")


def _table(types: list[str], simulated: dict[str, Row], reference: dict[str, Row], gloo: dict[str, Row]) -> str:
    lines = ["| type | here | culprit | reference | its reason |", "|---|---|---|---|---|"]
    for model_type in types:
        row, entry = simulated[model_type], reference[model_type]
        says = _SAYS.get(row["verdict"], row["verdict"])
        lines.append(
            f"| `{model_type}` | {says} | {_culprits(row)} | {entry['verdict']} | {_cell(entry.get('why', ''))} |"
        )
    return "\n".join(lines) + "\n"


def _culprits(row: Row) -> str:
    """Return each reason once, with the names it concerns, numbers of layers as ``*``."""
    reasons: dict[str, list[str]] = {}
    for culprit in row["culprits"]:
        name = ".".join("*" if step.isdigit() else step for step in culprit["fqn"].split("."))
        where = f" ({culprit['where']})" if culprit.get("where") else ""
        names = reasons.setdefault(f"{culprit['why']}{where}", [])
        if name and name not in names:
            names.append(name)
    texts = []
    for why, names in reasons.items():
        prefix = ", ".join(f"`{n}`" for n in names)
        texts.append(f"{prefix}: {_cell(why)}" if prefix else _cell(why))
    return "; ".join(texts)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _wrapped(text: str, width: int = 118) -> str:
    lines, line = [], ""
    for word in text.split(" "):
        if len(line) + len(word) + 1 > width:
            lines.append(line)
            line = word
        else:
            line = f"{line} {word}".strip()
    return "\n".join([*lines, line])
