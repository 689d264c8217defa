"""Hold predicted peaks of a step against torch's memory trackers: ``python benchmarks/peak.py --write``.

One process, fake tensors, the fake process group: rank 0 of worlds of 2 to 64 ranks, models from two narrow layers to
Llama 3 8B. Writes "Predicted and tracked peak" of ``docs/memory.md``; ``tests/parity/test_peak.py`` keeps small ones.
"""

from __future__ import annotations

import logging
import statistics
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
import transformers
from page import show, table
from torch import nn

from autoshard.plans import Plan

HEADER = (
    "model", "dp_replicate", "dp_shard", "tp", "batch", "tokens", "with", "tracked GiB", "predicted GiB", "at",
    "predicted / tracked",
)  # fmt: skip
FULL, SELECTIVE, CUT = {"checkpointing": "full"}, {"checkpointing": "selective"}, {"sequence_parallel": True}
MASTERS, MIXED = {"masters": "float32"}, {"mixed_precision": "bfloat16"}


def causal(kind: str, **sizes: Any) -> Callable[[], nn.Module]:
    """Return what builds a causal language model of transformers, without a cache."""
    config = getattr(transformers, f"{kind}Config")(use_cache=False, **sizes)
    return lambda: transformers.AutoModelForCausalLM.from_config(config)  # type: ignore[no-any-return]


def sizes(width: int, inner: int, layers: int, heads: int, kv_heads: int, vocab: int) -> dict[str, int]:
    """Return the sizes of a model by the names that most configs have for them."""
    return {
        "hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "vocab_size": vocab, "max_position_embeddings": 8192,
    }  # fmt: skip


MODELS = {
    "Llama, 2 layers of 64": causal("Llama", **sizes(64, 128, 2, 4, 4, 256)),
    "Llama 3.2 1B": causal("Llama", tie_word_embeddings=True, **sizes(2048, 8192, 16, 32, 8, 128256)),
    "Llama 3 8B": causal("Llama", **sizes(4096, 14336, 32, 32, 8, 128256)),
    # attention without dropout: with it no fused kernel runs on fake tensors
    "GPT-2 124M": causal("GPT2", attn_pdrop=0.0),
    "Gemma 2 2B, 6 layers": causal("Gemma2", head_dim=256, **sizes(2304, 9216, 6, 8, 4, 256000)),
    "Mixtral, 4 layers of 1024": causal("Mixtral", num_local_experts=8, **sizes(1024, 3584, 4, 16, 8, 32000)),
}
#: model, mesh (dp_replicate, dp_shard, tp), batch, tokens, options, dtype of the model
POINTS: tuple[tuple[str, tuple[int, int, int], int, int, dict[str, Any], torch.dtype], ...] = (
    ("Llama, 2 layers of 64", (1, 4, 1), 2, 32, {}, torch.bfloat16),
    ("Llama, 2 layers of 64", (1, 1, 2), 2, 32, {}, torch.bfloat16),
    ("Llama, 2 layers of 64", (2, 2, 2), 2, 32, SELECTIVE, torch.bfloat16),
    ("Llama 3.2 1B", (1, 8, 1), 1, 4096, {}, torch.bfloat16),
    ("Llama 3.2 1B", (8, 1, 1), 1, 4096, FULL, torch.bfloat16),
    ("Llama 3.2 1B", (1, 2, 4), 2, 4096, CUT, torch.bfloat16),
    ("Llama 3.2 1B", (1, 16, 1), 2, 4096, SELECTIVE | MASTERS, torch.bfloat16),
    ("Llama 3.2 1B", (1, 1, 4), 1, 2048, {}, torch.bfloat16),
    ("GPT-2 124M", (1, 8, 1), 8, 1024, {}, torch.bfloat16),
    ("GPT-2 124M", (1, 4, 2), 8, 1024, FULL | MIXED, torch.float32),
    ("Gemma 2 2B, 6 layers", (1, 4, 2), 1, 2048, {}, torch.bfloat16),
    ("Mixtral, 4 layers of 1024", (1, 8, 1), 1, 2048, {}, torch.bfloat16),
    ("Mixtral, 4 layers of 1024", (1, 4, 2), 2, 2048, FULL, torch.bfloat16),
    ("Llama 3 8B", (1, 8, 1), 1, 4096, {}, torch.bfloat16),
    ("Llama 3 8B", (2, 16, 2), 2, 8192, SELECTIVE, torch.bfloat16),
    ("Llama 3 8B", (1, 64, 1), 1, 8192, FULL | MASTERS, torch.bfloat16),
    ("Llama 3 8B", (1, 8, 4), 1, 8192, FULL | CUT, torch.bfloat16),
)


def row(index: int) -> tuple[Plan, int, tuple[object, ...]]:
    """Plan and track one point; return the plan, the tracked bytes and the line of the table."""
    from tracked_peak import Point, tracked

    name, mesh, batch, length, options, dtype = POINTS[index]
    point = Point(name, MODELS[name], mesh, batch, length, options, dtype)
    plan = point.plan()
    seen = tracked(point, plan)
    ratio = plan.peak_bytes / seen
    said = ", ".join(
        "sequence parallel" if key == "sequence_parallel" else f"{key}={value}" for key, value in options.items()
    )
    gib = [f"{size / 2**30:.2f}" if size >= 2**28 else f"{size / 2**30:.5f}" for size in (seen, plan.peak_bytes)]
    return plan, seen, (name, *mesh, batch, length, said, *gib, plan.peak_when, f"{ratio:.3f}")


def main() -> None:
    """Track and show."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    rows, ratios = [], []
    for index in range(len(POINTS)):
        plan, seen, line = row(index)
        rows.append(line)
        ratios.append(plan.peak_bytes / seen)
        print(*line, file=sys.stderr, flush=True)
    said = (
        f"{len(rows)} points: median {statistics.median(ratios):.3f}, from {min(ratios):.3f} to {max(ratios):.3f}.\n\n"
    )
    show("memory.md", {"peak": said + table(HEADER, rows)})


if __name__ == "__main__":
    main()
