"""Build a tiny model of a type, with inputs: ``model, inputs = tiny("llama"); model(**inputs)``.

As a command, ``python -m zoo.tiny [types...]`` builds and runs each and prints what fails.
"""

from __future__ import annotations

import sys
import time
import traceback
from typing import Any

import torch

from zoo.classes import config_class, model_class, plan_types
from zoo.configs import tiny_config
from zoo.inputs import example_inputs
from zoo.popular import POPULAR
from zoo.sizes import VOCAB


def build(model_type: str, device: str = "cpu", kv_heads: int | None = None, **over: Any) -> Any:
    """Return a model in eval mode, random from a fixed seed; ``over`` goes to its config."""
    torch.manual_seed(0)
    config = tiny_config(model_type, kv_heads, **over)
    with torch.device(device):
        model = model_class(config_class(model_type))(config).eval()
    for module in model.modules():
        if getattr(module, "eoi_token_index", 0) >= VOCAB:
            module.eoi_token_index = VOCAB - 20  # a row of the table by default, and no field of the config
    return model


def tiny(model_type: str, **options: Any) -> tuple[Any, dict[str, Any]]:
    """Return a model, as ``build`` does, and keyword arguments on which it runs."""
    model = build(model_type, **options)
    return model, example_inputs(model, model_type)


def main(types: list[str]) -> int:
    """Build and run types, all where none is named; return how many fail."""
    failed = 0
    for model_type in types or [*plan_types(), *POPULAR]:
        start = time.perf_counter()
        try:
            model, inputs = tiny(model_type)
            with torch.no_grad():
                model(**inputs)
        except Exception as error:  # noqa: BLE001 - whatever a type's own code raises is what this reports
            place = traceback.extract_tb(error.__traceback__)[-1]
            print(f"FAIL {model_type}: {error!r:.220} at {place.filename}:{place.lineno}", flush=True)
            failed += 1
            continue
        size = sum(p.numel() for p in model.parameters()) / 1e6
        print(f"ok   {model_type}: {size:.2f}M parameters, {time.perf_counter() - start:.1f} s", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(1 if main(sys.argv[1:]) else 0)
