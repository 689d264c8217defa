"""Hold each of transformers' hand-written tp plans against its own model: ``python benchmarks/hand_plans.py --write``.

Every type that has a plan is built tiny, from its config class; its ``model.tp_plan`` is verified at tp=2, all ranks
simulated, in a process for each type, with a time-out. What is done is kept in
``--results``, so that a broken run goes on where it stopped. ``--gloo`` repeats a sample on two real processes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from page import ROOT
from zoo.children import answers
from zoo.classes import plan_types
from zoo.tiny import tiny

import autoshard
from autoshard.errors import AutoshardError

#: Right ones of every kind (dense, fused, experts, latent attention, sinks, vision), and wrong ones that run.
SAMPLE = """
llama qwen3 gemma2 mixtral deepseek_v2 phi3 gpt_neox codegen olmo2 qwen3_moe longcat_flash gemma4_vision starcoder2
minicpm3 apertus qwen3_vl_moe_text sarvam_moe inkling2_text doge esmc
""".split()


def main() -> None:
    """Verify the named types, or all; print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("types", nargs="*", help="model types; all that have a plan where none is named")
    parser.add_argument("--write", action="store_true", help="write docs/hand_plans.md")
    parser.add_argument("--gloo", action="store_true", help="repeat the sample on two gloo processes")
    parser.add_argument("--timeout", type=float, default=180, help="seconds for one type")
    parser.add_argument("--workers", type=int, default=1, help="processes at once")
    parser.add_argument("--results", type=Path, default=ROOT / "build" / "hand_plans.jsonl")
    options = parser.parse_args()
    options.results.parent.mkdir(parents=True, exist_ok=True)
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    done = {**_read(options.results)}
    waiting = [t for t in options.types or plan_types() if options.types or ("simulated", t) not in done]
    sample = [t for t in SAMPLE if options.gloo and ("gloo", t) not in done]
    with options.results.open("a") as file:
        for row in itertools.chain(_simulate(waiting, options.timeout, options.workers), _on_gloo(sample)):
            done[row["how"], row["type"]] = row
            file.write(json.dumps(row) + "\n")
            file.flush()
            print(f"{row['how']:9s} {row['type']:38s} {row['verdict']:8s} {row['seconds']:5.1f} s", flush=True)
    if options.write:
        from hand_plans_page import page

        (ROOT / "docs" / "hand_plans.md").write_text(page(list(done.values())))


def _read(path: Path) -> dict[tuple[str, str], dict[str, Any]]:
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {(row["how"], row["type"]): row for row in rows}


def _on_gloo(types: list[str]) -> Iterator[dict[str, Any]]:
    from gloo import on_processes

    yield from ({"how": "gloo", **row} for row in (on_processes(types) if types else ()))


def _simulate(types: list[str], timeout: float, workers: int) -> Iterator[dict[str, Any]]:
    """Yield the row of each type, each from a process of its own."""
    for answer in answers(types, _verified, workers=workers, timeout=timeout) if types else ():
        row = answer.value if answer.fate == "answered" else {"verdict": answer.fate}
        yield {"how": "simulated", "type": answer.job, "culprits": [], **row, "seconds": answer.seconds}


def _verified(model_type: str) -> dict[str, Any]:
    model, inputs = tiny(model_type)
    try:
        proof = autoshard.verify(model, model.tp_plan, tp=2, example_inputs=inputs)
    except AutoshardError as error:
        # the model's own forward fails: there is nothing to hold the plan against
        return {"verdict": "none", "culprits": [{"kind": "model", "fqn": "", "why": f"{error.what}: {error.got}"}]}
    kinds = {culprit.kind for culprit in proof.culprits}
    verdict = "right" if proof.ok else "later" if kinds == {"not applied"} else "wrong"
    culprits = [{"kind": c.kind, "fqn": c.fqn, "why": c.why, "where": c.where} for c in proof.culprits]
    return {"verdict": verdict, "culprits": culprits, "parameters": len(proof.parameters)}


if __name__ == "__main__":
    main()
