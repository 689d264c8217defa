"""Choose a mesh for every published configuration: ``python benchmarks/published.py --write`` makes ``docs/meshes.md``.

``tests/published_meshes.csv`` holds what teams that tuned by hand used, one row a configuration, with its source; 0 and
an empty cell mean not stated. Each model is built on the meta device and planned with what the row states, nothing else
pinned. A degree counts as right within one power of two: the rows mix precisions, batches and software.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import diffusion
import page
from page import ROOT, put, table
from published_models import MODELS

import autoshard
from autoshard.cluster import Cluster
from autoshard.errors import AutoshardError
from autoshard.plans import MeshChoice, Plan

TABLE = ROOT / "tests" / "published_meshes.csv"
#: Tokens of a 256 x 256 image: latents of 32 x 32, packed two by two.
_IMAGE_TOKENS = 256
_HEADER = (
    "row",
    "model",
    "devices",
    "published",
    "chosen",
    "checkpointing",
    "GiB",
    "tokens/s of it",
    "of the published mesh",
    "ratio",
    "published tokens/s",
    "verdict",
)


@dataclass(frozen=True)
class Row:
    """One published configuration; 0 and ``""`` where something is not stated.

    Attributes:
        row: its number.
        model: names its builder in ``published_models``.
        device: as in ``autoshard.devices``; ``memory_gib`` as the source states it.
        world: number of devices; ``tp``, ``pp``, ``cp``, ``ep`` and ``dp_shard`` are degrees.
        micro_batch: sequences per data rank; ``sequence``: tokens of each.
        checkpointing: ``none``, ``selective`` or ``full``.
        precision: ``bf16`` or ``fp8``.
        zero1: whether the optimizer's state is sharded over replicas.
        below_tp: the tp that must be ranked above this row's, at the largest batch that it can take, or 0.
        remark: what else is said; ``tokens_per_second`` of each device, as printed; ``source``.
    """

    row: int
    model: str
    device: str
    memory_gib: int
    world: int
    tp: int
    pp: int
    cp: int
    ep: int
    dp_shard: int
    micro_batch: int
    sequence: int
    checkpointing: str
    precision: str
    zero1: bool
    below_tp: int
    remark: str
    tokens_per_second: str
    source: str

    @property
    def other_axes(self) -> bool:
        """Whether it used an axis that a plan does not have."""
        return max(self.pp, self.cp, self.ep) > 1

    @property
    def published(self) -> str:
        """Its degrees, those of 1 left out."""
        degrees = {name: getattr(self, name) for name in ("dp_shard", "tp", "pp", "cp", "ep")}
        return " ".join(f"{name}={degree}" for name, degree in degrees.items() if degree > 1) or "replicas alone"


def rows() -> list[Row]:
    """Read the published configurations."""
    kinds = {"int": lambda text: int(text or 0), "bool": bool, "str": str}
    fields = {name: kinds[str(kind)] for name, kind in Row.__annotations__.items()}
    with TABLE.open(newline="") as file:
        return [Row(**{name: read(line[name]) for name, read in fields.items()}) for line in csv.DictReader(file)]


def settings(row: Row) -> dict[str, Any]:
    """Return what ``autoshard.plan`` gets for a row: what it states, and nothing of the answer.

    ``dp_shard=1`` is pinned only where nothing of the data-parallel state was sharded. What is trained is held in
    float32 and computed in bfloat16. fp8 is bfloat16 with the device's fp8 rate.
    """
    cluster = Cluster.of(row.device, memory=row.memory_gib)
    if row.precision == "fp8":
        flops = {**cluster.device.flops, "bfloat16": cluster.device.peak("float8")}
        cluster = replace(cluster, device=replace(cluster.device, flops=flops))
    pinned = row.dp_shard == 1 and not row.zero1
    found = {
        "world": row.world,
        "batch": row.micro_batch or 1,
        "sequence": row.sequence or _IMAGE_TOKENS,
        "device": cluster,
        "checkpointing": row.checkpointing or None,
        "masters": "float32",
        # as all of these sources do under tp: the loss runs on logits that stay cut
        "logits": "sharded" if row.sequence else "whole",
        "dp_shard": 1 if pinned else None,
    }
    return found | ({} if row.sequence else {"example_inputs": diffusion.inputs(_IMAGE_TOKENS)})


def as_published(row: Row, choices: Iterable[MeshChoice]) -> MeshChoice | None:
    """Return the price of the row's own mesh; where it has other axes or ZeRO-1, of the best mesh with its tp."""
    priced = [c for c in choices if c.mesh.tp == row.tp and c.total_bytes]
    exact = [c for c in priced if c.mesh.dp_shard == row.dp_shard]
    found = priced if row.other_axes or row.zero1 or row.dp_shard == 0 else exact
    return max(found, key=lambda c: (c.fits, c.tokens_per_second, -c.total_bytes), default=None)


def verdict(row: Row, chosen: MeshChoice, theirs: MeshChoice | None) -> str:
    """Return how the choice compares, as ``docs/meshes.md`` explains."""
    across = chosen.mesh.tp > Cluster.of(row.device).devices_per_node
    if row.other_axes and (across or not chosen.fits):
        return "wants another axis"
    if not chosen.fits:
        return "off: nothing fits"
    if row.below_tp:
        return "ranks below" if theirs and theirs.tokens_per_second < chosen.tokens_per_second else "off: ranks above"
    low, high = sorted((row.tp, chosen.mesh.tp))
    return "equal" if low == high else "within one power of two" if high <= 2 * low else "off"


def cells(row: Row, plan: Plan, rival: Plan | None = None) -> tuple[object, ...]:
    """Return the row of the page; ``rival`` is what the published mesh has to rank below."""
    chosen, theirs = (rival or plan).meshes[0], as_published(row, plan.meshes)
    known = theirs is not None and theirs.tokens_per_second > 0
    ratio = f"{chosen.tokens_per_second / theirs.tokens_per_second:.2f}" if theirs is not None and known else "-"
    speed = "-" if theirs is None else f"{theirs.tokens_per_second:,.0f}" + ("" if theirs.fits else " (does not fit)")
    return (
        *_about(row),
        str(chosen.mesh),
        chosen.checkpointing,
        f"{chosen.total_bytes / 2**30:.0f}",
        f"{chosen.tokens_per_second:,.0f}",
        speed,
        ratio,
        row.tokens_per_second or "-",
        verdict(row, chosen, theirs),
    )


def _about(row: Row) -> tuple[object, ...]:
    model = f"{row.model}, {row.micro_batch or 1} x {row.sequence or _IMAGE_TOKENS}"
    return row.row, f"{model}, fp8" if row.precision == "fp8" else model, f"{row.world} {row.device}", row.published


def measure(row: Row) -> tuple[object, ...]:
    """Plan a row; a refusal is told in the verdict."""
    model = MODELS[row.model].on_meta()
    try:
        plan = autoshard.plan(model, **settings(row))
        if not row.below_tp:
            return cells(row, plan)
        # it may not take the row's batch at once: then it takes as much as it can, several times a step
        most = max(c.max_batch or 0 for c in plan.meshes if c.mesh.tp == row.below_tp)
        batch = min(row.micro_batch, most)
        return cells(row, plan, autoshard.plan(model, **settings(row) | {"tp": row.below_tp, "batch": batch}))
    except AutoshardError as error:
        return (*_about(row), *("-",) * 7, f"refused: {error.what}")


def summary(found: Sequence[Sequence[object]]) -> str:
    """Count the verdicts, rows with another axis apart."""
    by_row = {row.row: row for row in rows()}
    plain = Counter(str(cells[-1]) for cells in found if not by_row[int(str(cells[0]))].other_axes)
    other = Counter(str(cells[-1]) for cells in found if by_row[int(str(cells[0]))].other_axes)
    lines = []
    for name, counts in (("of our three axes", plain), ("with pp, cp or ep", other)):
        told = ", ".join(f"{count} {what}" for what, count in counts.most_common())
        lines.append(f"Rows {name}: {sum(counts.values())}: {told or 'none'}.")
    return "\n".join(lines)


def sources(chosen: Iterable[Row]) -> str:
    """Say where each row is from, and what else it states."""
    return "\n".join(
        f"* {row.row}: {row.source}; {MODELS[row.model].source}" + (f". {row.remark}" if row.remark else "")
        for row in chosen
    )


def version() -> str:
    """Return a digest of all that a row's result depends on."""
    digest = hashlib.sha256(page.version().encode())
    for path in (
        TABLE,
        *(
            ROOT / "benchmarks" / f"{name}.py"
            for name in ("diffusion", "published", "published_kernels", "published_models")
        ),
    ):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def known(path: Path, code: str | None) -> dict[int, list[object]]:
    """Return the results that are stored in ``path`` by row: those that the version ``code`` found, or all."""
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    return {line["row"]: line["cells"] for line in lines if code in (None, line["version"])}


def main() -> None:
    """Plan the rows that are not stored yet, and print or write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", nargs="+", type=int, default=[], help="numbers; all where left out")
    parser.add_argument("--stale", action="store_true", help="take rows that another version of the code found")
    parser.add_argument("--write", action="store_true", help="write docs/meshes.md")
    parser.add_argument("--results", type=Path, default=ROOT / "build" / "meshes.jsonl")
    options = parser.parse_args()
    if options.write and options.rows:
        parser.error("--write makes the whole page: leave out --rows")
    warnings.filterwarnings("ignore")
    chosen = [row for row in rows() if row.row in options.rows or not options.rows]
    # what is loaded by now is what runs, whatever becomes of the files
    code = version()
    found = known(options.results, None if options.stale else code)
    options.results.parent.mkdir(exist_ok=True)
    for row in chosen:
        if row.row in found:
            continue
        start = time.perf_counter()
        found[row.row] = list(measure(row))
        with options.results.open("a") as file:
            file.write(json.dumps({"row": row.row, "version": code, "cells": found[row.row]}) + "\n")
        print(*found[row.row], f"{time.perf_counter() - start:.1f} s", sep=" | ", flush=True)
    told = [found[row.row] for row in chosen]
    text = "\n\n".join((summary(told), table(_HEADER, told), sources(chosen)))
    if options.write:
        put("meshes.md", "published", text)
    else:
        print(text)


if __name__ == "__main__":
    main()
