"""A verification as text for a terminal: the verdict first, then what explains it, then the errors."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Group, RenderableType
from rich.text import Text

from autoshard.layout import bullets, columns, section, to_text
from autoshard.proving.proof import Proof
from autoshard.words import counted

_MOST = 12


def render(proof: Proof) -> RenderableType:
    """Return what ``autoshard verify`` prints."""
    rows: list[RenderableType] = [Text(_verdict(proof))]
    if proof.culprits:
        lines = [f"{c.fqn or '(the model)'}: {c.why}" + (f" ({c.where})" if c.where else "") for c in proof.culprits]
        rows.append(section("What explains it", bullets(lines)))
    outputs = {path or "(result)": e for path, e in proof.outputs.items()}
    rows += _errors(proof, "Wrong outputs", outputs)
    rows += _errors(proof, "Wrong gradients", proof.parameters)
    rows += _errors(proof, "Wrong parameters after one optimizer step", proof.updates)
    if proof.shrunk:
        rows.append(section("Made smaller for the proof, and other remarks", bullets(list(proof.shrunk))))
    rows.append(Text(proof.not_proved))
    return Group(*rows)


def _errors(proof: Proof, title: str, errors: Mapping[str, float]) -> list[RenderableType]:
    wrong = proof.above(errors)
    if not wrong:
        return []
    table = columns([(f"{error:.1e}", name) for name, error in list(wrong.items())[:_MOST]])
    more = [Text(f"  and {len(wrong) - _MOST} more")] if len(wrong) > _MOST else []
    return [section(f"{title} (relative error)", Group(table, *more))]


def _verdict(proof: Proof) -> str:
    ranks = f"{proof.tp} simulated tp ranks" if proof.mesh is None else f"{proof.mesh.world} processes ({proof.mesh})"
    if not proof.parameters and proof.ok:
        return f"nothing to prove on {ranks}"
    groups = [
        ("output", proof.outputs),
        ("gradient", proof.parameters),
        *([("updated parameter", proof.updates)] if proof.updates else []),
    ]
    if proof.ok:
        worst = max(error for _, errors in groups for error in errors.values())
        what = _listed([counted(len(errors), name) for name, errors in groups])
        return (
            f"exact: {what} agree on {ranks}\n"
            f"  within {proof.tolerance:.0e}; the worst differs by {worst:.0e}; {proof.seconds:.1f} s"
        )
    if not proof.parameters and all(culprit.kind == "not applied" for culprit in proof.culprits):
        return "not judged: the executor cannot apply the plan yet"
    if not proof.parameters:
        return f"WRONG: the plan does not run on {ranks}"
    bad = _listed([f"{len(proof.above(errors))} of {counted(len(errors), name)}" for name, errors in groups])
    return f"WRONG: {bad} differ on {ranks}\n  by more than {proof.tolerance:.0e}; {proof.seconds:.1f} s"


def _listed(items: list[str]) -> str:
    return ", ".join(items[:-1]) + " and " + items[-1]


def render_text(proof: Proof, width: int = 80) -> str:
    """Return the proof as plain text."""
    return to_text(render(proof), width)


__all__ = ["render", "render_text"]
