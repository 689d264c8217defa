"""Texts that are compared with a file; `make golden` accepts the new ones, to be reviewed as a diff."""

from __future__ import annotations

import os
from pathlib import Path

FOLDER = Path(__file__).parent / "golden"


def check_golden(name: str, text: str) -> None:
    """Compare ``text`` with ``golden/name.txt``. Tests that call this have ``golden`` in their name."""
    path = FOLDER / f"{name}.txt"
    if os.environ.get("ACCEPT_GOLDEN"):
        path.write_text(text)
    assert path.is_file(), f"no golden text {path.name} yet: run `make golden` and review it"
    assert text == path.read_text(), f"{path.name} differs: if the new text is right, run `make golden`"
