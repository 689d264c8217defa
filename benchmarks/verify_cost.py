"""Time and memory of verify, each model in a process of its own: ``python benchmarks/verify_cost.py``.

Prints the table of docs/verify.md. Seconds are of one thread; memory is the peak of the whole process, torch included.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"
sys.path.insert(0, str(EXAMPLES))

#: Name of a model in ``_models``, and the tensor-parallel degree.
CASES = [
    ("decoder, 8 layers, width 512", 4),
    ("Llama 3 8B", 4),
    ("Llama 3 8B", 8),
    ("Qwen3 8B", 4),
]


def _models() -> dict[str, Callable[[], object]]:
    from decoder import Decoder, DecoderConfig

    from autoshard.targets import load_model

    small = DecoderConfig(hidden=512, inner=1408, layers=8, heads=8, kv_heads=4)
    return {
        "decoder, 8 layers, width 512": lambda: Decoder(small),
        "Llama 3 8B": lambda: load_model(str(EXAMPLES / "llama3_8b.json")),
        "Qwen3 8B": lambda: load_model(str(EXAMPLES / "configs" / "qwen3_8b.json")),
    }


def measure(name: str, tp: int) -> dict[str, object]:
    """Verify one model in this process."""
    import torch
    from torch import nn

    import autoshard

    torch.set_num_threads(1)
    model = _models()[name]()
    assert isinstance(model, nn.Module)
    parameters = sum(p.numel() for p in model.parameters())
    plan = autoshard.plan(model, world=tp, tp=tp)
    start = time.perf_counter()
    proof = autoshard.verify(model, plan)
    return {
        "parameters": parameters,
        "ok": proof.ok,
        "seconds": time.perf_counter() - start,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024),
    }


def main() -> None:
    """Measure every case, or the one that the arguments name."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", type=int, help="measure this case only, and print it as JSON")
    case: int | None = parser.parse_args().case
    if case is not None:
        print(json.dumps(measure(*CASES[case])))
        return
    print("| model | parameters | tp | verdict | seconds | peak memory |")
    print("|---|---:|---:|---|---:|---:|")
    for number, (name, tp) in enumerate(CASES):
        command = [sys.executable, __file__, "--case", str(number)]
        found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        verdict = "exact" if found["ok"] else "WRONG"
        size = f"{found['parameters'] / 1e9:.2f} billion"
        memory = f"{found['peak_bytes'] / 2**30:.1f} GiB"
        print(f"| {name} | {size} | {tp} | {verdict} | {found['seconds']:.1f} | {memory} |", flush=True)


if __name__ == "__main__":
    main()
