"""Small models whose steps are timed, and the work of one rank: train each mesh in turn."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import autoshard
from autoshard.plans import Plan

#: sequences of one step over all ranks, and tokens of each
GLOBAL_BATCH, LENGTH = 8, 128


def _deep() -> nn.Module:
    return _llama(hidden_size=256, intermediate_size=768, num_hidden_layers=12, vocab_size=512)


def _wide() -> nn.Module:
    return _llama(hidden_size=768, intermediate_size=2048, num_hidden_layers=2, vocab_size=4096)


def _llama(**sizes: int) -> nn.Module:
    config = transformers.LlamaConfig(num_attention_heads=8, num_key_value_heads=4, use_cache=False, **sizes)
    return transformers.LlamaForCausalLM(config)


def _gpt() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=2048,
        n_positions=LENGTH,
        n_embd=384,
        n_layer=6,
        n_head=8,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    return transformers.GPT2LMHeadModel(config)


MODELS: Mapping[str, Callable[[], nn.Module]] = {"deep Llama": _deep, "wide Llama": _wide, "GPT-2": _gpt}


def ids(rows: slice, vocabulary: int) -> Tensor:
    """Return some rows of the global batch (``GLOBAL_BATCH``, ``LENGTH``)."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, vocabulary, (GLOBAL_BATCH, LENGTH), generator=generator)[rows]


class Trained:
    """One mesh's model on this rank."""

    def __init__(self, name: str, plan: Plan) -> None:
        torch.manual_seed(0)
        model = MODELS[name]()
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        self.model = autoshard.parallelize(model, plan, optimizer=self.optimizer)
        share, index = GLOBAL_BATCH // plan.mesh.data, dist.get_rank() // plan.mesh.tp
        self.ids = ids(slice(index * share, (index + 1) * share), model.config.vocab_size)

    def step(self) -> float:
        """Train once, begun together with the other ranks, and return the seconds until the last of them is done."""
        dist.barrier()
        start = time.perf_counter()
        logits = self.model(self.ids).logits
        F.cross_entropy(logits[:, :-1].flatten(0, 1), self.ids[:, 1:].flatten()).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        dist.barrier()
        return time.perf_counter() - start


def measure(name: str, plans: list[dict[str, Any]], repetitions: int) -> list[float]:
    """Train every plan ``repetitions`` times, one step of each in turn; return the median seconds of each.

    The first step of each does not count.
    """
    trained = [Trained(name, Plan.from_dict(plan)) for plan in plans]
    seconds: list[list[float]] = [[] for _ in trained]
    for _ in range(repetitions + 1):
        for each, taken in zip(trained, seconds, strict=True):
            taken.append(each.step())
    return [statistics.median(taken[1:]) for taken in seconds]
