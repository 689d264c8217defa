"""Say why a mesh was chosen, and what would help where none fits."""

from __future__ import annotations

from collections.abc import Sequence

from autoshard.cost import MARGIN
from autoshard.passes.choose_mesh import TIE, ChooseMesh
from autoshard.plans import AXES, MeshChoice
from autoshard.words import human_bytes, percent


def explain_choice(choices: Sequence[MeshChoice], meshes: ChooseMesh, device: str) -> str:
    """Return one sentence: why the first choice was taken of all."""
    best = choices[0]
    budget = f"{human_bytes(meshes.budget)} ({percent(MARGIN)} of {device})"
    if not best.fits:
        return f"nothing fits {budget}: {human_bytes(best.total_bytes)} is the least"
    pinned = [name for name in AXES if getattr(meshes, name) is not None]
    fits = f"{human_bytes(best.total_bytes)} of {budget}"
    if len(choices) == 1:
        return f"{' and '.join(pinned) or 'the world'} leaves no other; it fits: {fits}"
    others = [c for c in choices[1:] if c.fits]
    if not others:
        return f"the only mesh that fits: {fits}"
    fastest = max(c.tokens_per_second for c in choices if c.fits)
    if best.tokens_per_second < fastest:
        return f"the simplest of those within {percent(TIE)} of the fastest; it fits: {fits}"
    return f"the fastest that fits: {fits}"
