"""Tables that a command measures, kept between two marks in a page of the docs."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parents[1]
# the ranks of the tests serve here too
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def version() -> str:
    """Return a digest of all code that a row on tiny models depends on, and of what it ran on."""
    names = [f"{name} {metadata.version(name)}" for name in ("torch", "transformers")]
    digest = hashlib.sha256(" ".join(names).encode())
    for folder in ("autoshard", "passes", "tests/zoo"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            digest.update(file.relative_to(ROOT).as_posix().encode() + file.read_bytes())
    return digest.hexdigest()[:12]


def put(page: str, mark: str, text: str) -> None:
    """Replace what stands between ``<!-- mark -->`` and ``<!-- /mark -->`` in ``docs/page``.

    Raises:
        ValueError: the page has no such marks.
    """
    path = ROOT / "docs" / page
    before, opening, rest = path.read_text().partition(f"<!-- {mark} -->\n")
    _, closing, after = rest.partition(f"<!-- /{mark} -->")
    if not closing:
        raise ValueError(f"docs/{page} has no marks <!-- {mark} --> and <!-- /{mark} -->")
    path.write_text(f"{before}{opening}\n{text}\n\n{closing}{after}")


def show(page: str, tables: dict[str, str]) -> None:
    """Print the tables, and put them into the page if the command was given ``--write``."""
    for mark, text in tables.items():
        print(f"{mark}\n\n{text}\n")
        if "--write" in sys.argv[1:]:
            put(page, mark, text)
