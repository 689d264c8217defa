"""Hold the predicted peak of a step against the CUDA allocator's: ``python benchmarks/gpu_memory.py --write``.

One device, world 1: what the plan says of parameters, gradients, optimizer state, activations and the loss, with
nothing gathered. Llamas in bfloat16 train with AdamW; the peak is of a second step, when the optimizer has its state.
"""

from __future__ import annotations

import argparse
import gc
import os
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from page import put, table
from torch import nn

import autoshard
from autoshard.plans import Plan

#: hidden size, feed-forward, layers, heads, tied: those of Llama 3.2 1B and 3B, and Llama 3 8B; vocabulary 128256
SIZES = {
    "1B": (2048, 8192, 16, 32, True),
    "3B": (3072, 8192, 28, 24, True),
    "8B": (4096, 14336, 32, 32, False),
}
BATCHES = (1, 2, 4, 8)
SEQUENCE = 2048
CHECKPOINTING = ("none", "selective", "full")
_HEADER = ("Llama", "batch", "checkpointing", "predicted GiB", "at", "measured GiB", "predicted / measured")


@dataclass(frozen=True)
class Peak:
    """One run: predicted and measured bytes; measured is None where it ran out of memory."""

    size: str
    batch: int
    checkpointing: str
    predicted: int
    when: str
    measured: int | None


def build(size: str) -> nn.Module:
    """Return a Llama in bfloat16, on the current default device."""
    hidden, wide, layers, heads, tied = SIZES[size]
    config = transformers.LlamaConfig(
        vocab_size=128256,
        hidden_size=hidden,
        intermediate_size=wide,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        tie_word_embeddings=tied,
        use_cache=False,
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        model: nn.Module = transformers.LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    return model


def predict(size: str, batch: int, checkpointing: str, memory_gib: float) -> Plan:
    """Plan one device."""
    with torch.device("meta"):
        model = build(size)
    return autoshard.plan(
        model, world=1, batch=batch, sequence=SEQUENCE, checkpointing=checkpointing, memory=memory_gib
    )


def measure(size: str, plan: Plan) -> int | None:
    """Return the most bytes that were allocated in a second step; None where memory ran out."""
    device = torch.device("cuda", torch.cuda.current_device())
    try:
        with device:
            model = build(size)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)
        model = autoshard.parallelize(model, plan, optimizer=optimizer)
        ids = torch.randint(0, 128256, (plan.workload.batch, SEQUENCE), device=device)
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats()
            logits = model(input_ids=ids).logits.float()
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
            del logits  # autograd holds what it needs
            loss.backward()
            del loss
            optimizer.step()
            optimizer.zero_grad()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()
    except torch.cuda.OutOfMemoryError:
        return None


def peaks(sizes: Iterable[str], batches: Sequence[int]) -> Iterator[Peak]:
    """Predict and measure every size, batch and checkpointing."""
    memory = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory / 2**30
    for size in sizes:
        for batch in batches:
            for checkpointing in CHECKPOINTING:
                plan = predict(size, batch, checkpointing, memory)
                measured = measure(size, plan)
                gc.collect()
                torch.cuda.empty_cache()
                found = Peak(size, batch, checkpointing, plan.total_bytes, plan.peak_when, measured)
                print(found, flush=True)
                yield found


def page(found: Sequence[Peak]) -> str:
    """Return the table."""
    rows = [
        (
            peak.size,
            peak.batch,
            peak.checkpointing,
            f"{peak.predicted / 2**30:.2f}",
            peak.when,
            "out of memory" if peak.measured is None else f"{peak.measured / 2**30:.2f}",
            "-" if peak.measured is None else f"{peak.predicted / peak.measured:.3f}",
        )
        for peak in found
    ]
    head = f"{torch.cuda.get_device_name()}, torch {torch.__version__}; {SEQUENCE} tokens a sequence, bfloat16, AdamW."
    return f"{head}\n\n{table(_HEADER, rows)}"


def main() -> None:
    """Measure, and print or write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--batches", nargs="+", type=int, default=list(BATCHES))
    parser.add_argument("--write", action="store_true", help="write it into docs/meshes.md")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit(f"error: there is no GPU that torch {torch.__version__} can use; this measures its allocator")
    warnings.filterwarnings("ignore")
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
        dist.init_process_group("nccl", init_method=f"file://{folder}/meeting", rank=0, world_size=1)
        try:
            text = page(list(peaks(options.sizes, options.batches)))
        finally:
            dist.destroy_process_group()
    print(text)
    if options.write:
        put("meshes.md", "gpu memory", text)


if __name__ == "__main__":
    main()
