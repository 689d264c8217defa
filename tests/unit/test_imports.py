"""Imports flow one way; what a plan's reader needs works without torch."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIBRARY = sorted(path for path in (ROOT / "autoshard").rglob("*.py") if "passes" not in path.parts)
PASSES = sorted((ROOT / "passes").rglob("*.py"))
TORCH_FREE = tuple(f"autoshard{name}" for name in ("", ".plans", ".report", ".diff", ".errors", ".ir", ".cluster"))
LEAVES = {
    "errors": set(),
    "patterns": set(),
    "plans": {"errors", "patterns", "rewrite.record"},
    "plan_data": {"plans", "rewrite.record"},
    "ir": {"errors"},
    "words": {"patterns"},
    "devices": {"errors"},
    "cluster": {"devices", "errors"},
    "rewrite/record": set(),
}
# what decides must not depend on what applies or shows
APPLIES = {"api", "executor", "optim", "proving", "hand", "report", "diff", "targets", "cli"}


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)


def imported(path: Path) -> Iterator[str]:
    """Yield the modules of this library that a file imports, anywhere in it, without the package's name."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (one.name.removeprefix("autoshard.") for one in node.names if one.name.startswith("autoshard."))
        elif isinstance(node, ast.ImportFrom) and node.module == "autoshard":
            yield from (one.name for one in node.names)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("autoshard."):
            yield (node.module or "").removeprefix("autoshard.")


@pytest.mark.parametrize("name", [*TORCH_FREE, "autoshard.cli"])
def test_needs_no_torch(name: str) -> None:
    done = run(f"import sys, {name}; sys.exit('torch' in sys.modules)")
    assert done.returncode == 0, done.stderr


def test_nothing_imports_the_command_line() -> None:
    users = {path.name for path in [*LIBRARY, *PASSES] if "cli" in imported(path)}
    assert users == {"__main__.py"}


@pytest.mark.parametrize("name", LEAVES)
def test_leaves_import_only_what_is_below(name: str) -> None:
    # a plan prints and reads itself: the imports upwards, made when they are asked for
    above = {"report", "plan_data"} if name == "plans" else set()
    assert set(imported(ROOT / "autoshard" / f"{name}.py")) <= LEAVES[name] | above


@pytest.mark.parametrize("path", PASSES, ids=lambda path: path.name)
def test_passes_import_nothing_that_applies_or_shows(path: Path) -> None:
    assert not APPLIES & {name.split(".")[0] for name in imported(path)}


def test_passes_is_no_package_of_its_own() -> None:
    done = run("import passes")
    assert done.returncode == 1
    assert "import autoshard.passes, not passes" in done.stderr
    assert run("import autoshard.passes").returncode == 0


def test_every_package_is_installed() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        named = set(tomllib.load(file)["tool"]["setuptools"]["packages"])
    files = [*LIBRARY, *(ROOT / "autoshard" / path.relative_to(ROOT) for path in PASSES)]
    folders = {path.parent.relative_to(ROOT) for path in files if path.name == "__init__.py"}
    assert named == {".".join(folder.parts) for folder in folders}
