"""Tables that a command measures, kept between two marks in a page of the docs."""

from __future__ import annotations

import argparse
import hashlib
import logging
import sys
import warnings
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
# the ranks of the tests serve here too
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def sweep_options(description: str | None, option: str, one: str, name: str) -> argparse.ArgumentParser:
    """Return the options of a sweep over tiny models, and make this process one whose children have a core each.

    Args:
        description: what the command does.
        option: names what is to be done again.
        one: what one process measures.
        name: of the page and of the file with the results.
    """
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(option, nargs="+", default=[], help="names, done again; all where left out")
    parser.add_argument("--timeout", type=float, default=300, help=f"seconds for {one}")
    parser.add_argument("--workers", type=int, default=2, help="processes at once")
    parser.add_argument("--stale", action="store_true", help="take rows that another version of the code found")
    parser.add_argument("--write", action="store_true", help=f"write docs/{name}.md")
    parser.add_argument("--results", type=Path, default=ROOT / "build" / f"{name}.jsonl")
    return parser


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
