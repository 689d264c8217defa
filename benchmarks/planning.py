"""Time and memory of planning, each run in a process of its own: ``python benchmarks/planning.py --write``.

Makes the tables of docs/planning.md. Seconds are of one thread, after imports and building the model on the meta
device; memory is the peak of the whole process, torch and transformers included. It wants a machine that does nothing
else.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any

from page import ROOT, put, table

_EXAMPLE = ROOT / "examples" / "llama3_8b.json"
_RUNS = 3
#: What a process that plans a Hugging Face model cannot do without.
_BARE = "import torch, transformers"
#: Llama-3.1-405B, from its config.json on the Hub.
_LARGEST = {
    "hidden_size": 16384,
    "intermediate_size": 53248,
    "num_hidden_layers": 126,
    "num_attention_heads": 128,
    "num_key_value_heads": 8,
}


@dataclass(frozen=True)
class Case:
    """One model on one number of devices.

    Attributes:
        name: what the table calls it.
        over: what differs from ``examples/llama3_8b.json``.
        world: number of devices.
    """

    name: str
    over: dict[str, int]
    world: int


CASES = (
    Case("Llama-3-8B, 32 layers", {}, 8),
    Case("Llama-3-8B, 32 layers", {}, 64),
    Case("Llama-3.1-405B, 126 layers", _LARGEST, 8),
    Case("Llama-3.1-405B, 126 layers", _LARGEST, 512),
)


def measure(case: Case) -> dict[str, Any]:
    """Plan one model in this process."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    import autoshard

    torch.set_num_threads(1)
    config = AutoConfig.for_model(**(json.loads(_EXAMPLE.read_text()) | case.over))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    start = time.perf_counter()
    plan = autoshard.plan(model, world=case.world)
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return {"seconds": seconds, "peak": peak, "meshes": len(plan.meshes), "mesh": str(plan.mesh)}


def cases() -> str:
    """Return the table of all cases: the fastest and the middle of several processes each."""
    rows = []
    for number, case in enumerate(CASES):
        command = [sys.executable, __file__, "--case", str(number)]
        found = [json.loads(subprocess.run(command, capture_output=True, check=True).stdout) for _ in range(_RUNS)]
        seconds = sorted(one["seconds"] for one in found)
        peak = max(one["peak"] for one in found) / 2**30
        middle = statistics.median(seconds)
        last = found[-1]
        rows.append(
            (case.name, case.world, last["meshes"], last["mesh"], f"{seconds[0]:.2f}", f"{middle:.2f}", f"{peak:.2f}")
        )
        print(rows[-1], flush=True)
    return table(("model", "devices", "meshes priced", "chosen", "s, fastest", "s, middle", "peak GiB"), rows)


def process() -> str:
    """Return a sentence on the whole of ``autoshard explain``, beside imports alone: both in turn, several times."""
    explain = [sys.executable, "-m", "autoshard", "explain", str(_EXAMPLE), "--world", "8"]
    pairs = [(_seconds([sys.executable, "-c", _BARE]), _seconds(explain)) for _ in range(_RUNS)]
    bare, whole = (statistics.median(side) for side in zip(*pairs, strict=True))
    ratio = statistics.median(ours / other for other, ours in pairs)
    return (
        f"`autoshard explain examples/llama3_8b.json --world 8` takes {whole:.1f} s from start to end, "
        f"`{_BARE}` alone {bare:.1f} s: {ratio:.2f} times as long (the middle of {_RUNS} pairs in turn)."
    )


def _seconds(command: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run(command, capture_output=True, check=True)
    return time.perf_counter() - start


def main() -> None:
    """Measure everything, or the case that the arguments name."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", type=int, help="measure this case only, and print it as JSON")
    parser.add_argument("--write", action="store_true", help="write docs/planning.md")
    options = parser.parse_args()
    if options.case is not None:
        print(json.dumps(measure(CASES[options.case])))
        return
    text = f"{process()}\n\n{cases()}"
    print(text)
    if options.write:
        put("planning.md", "measured", text)


if __name__ == "__main__":
    main()
