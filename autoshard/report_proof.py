"""A verification as text for a terminal: the verdict first, then what explains it, then the errors."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from autoshard.layout import bullets, columns, section, to_text
from autoshard.proof import NOT_PROVED, Proof

_MOST = 12


def render(proof: Proof) -> RenderableType:
    """Return what ``autoshard verify`` prints."""
    rows: list[RenderableType] = [Text(_verdict(proof))]
    if proof.culprits:
        lines = [f"{c.fqn or '(the model)'}: {c.why}" + (f" ({c.where})" if c.where else "") for c in proof.culprits]
        rows.append(section("What explains it", bullets(lines)))
    outputs = {path or "(result)": e for path, e in proof.outputs.items() if not e <= proof.tolerance}
    for title, wrong in (("Wrong outputs", outputs), ("Wrong gradients", proof.wrong)):
        if wrong:
            shown = list(wrong.items())[:_MOST]
            table = columns([(f"{error:.1e}", name) for name, error in shown])
            more = [Text(f"  and {len(wrong) - _MOST} more")] if len(wrong) > _MOST else []
            rows.append(section(f"{title} (relative error)", Group(table, *more)))
    if proof.shrunk:
        rows.append(section("Made smaller for the proof", bullets(list(proof.shrunk))))
    rows.append(Text(NOT_PROVED))
    return Group(*rows)


def _verdict(proof: Proof) -> str:
    what = f"{len(proof.outputs)} outputs and {len(proof.parameters)} gradients on {proof.tp} tp ranks"
    worst = max([*proof.outputs.values(), *proof.parameters.values()], default=0.0)
    if proof.ok:
        return f"exact: {what} agree within {proof.tolerance:.0e} (worst {worst:.1e}, {proof.seconds:.1f} s)"
    bad = sum(not e <= proof.tolerance for e in proof.outputs.values())
    gradients = f"{len(proof.wrong)} of {len(proof.parameters)} gradients"
    return f"WRONG: {bad} outputs and {gradients} differ on {proof.tp} tp ranks"


def render_text(proof: Proof, width: int = 80) -> str:
    """Return the proof as plain text."""
    return to_text(render(proof), width)


__all__ = ["render", "render_text"]
