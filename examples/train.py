"""Train a small decoder on bytes of text, sharded.

    torchrun --nproc-per-node 4 examples/train.py --tp 2          the decoder of decoder.py
    torchrun --nproc-per-node 4 examples/train.py --tp 2 --hf     a Llama of transformers

Two lines are autoshard's: the import and the call. The optimizer is made before the model is sharded.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch
import torch.distributed as dist
from corpus import VOCAB, batches
from decoder import Decoder, DecoderConfig
from torch import nn
from torch.nn import functional as F

import autoshard

BATCH, SEQUENCE = 8, 128  # sequences in all, bytes each


def make_model(hf: bool = False) -> nn.Module:
    """About three million parameters, the same on every rank."""
    torch.manual_seed(0)
    if not hf:
        return Decoder(DecoderConfig(vocab=VOCAB, hidden=256, inner=704, layers=4, heads=8, kv_heads=4))
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "max_position_embeddings": SEQUENCE}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, use_cache=False, **sizes, **heads))


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, data_rank: int = 0, num_data: int = 1
) -> Iterator[float]:
    """Yield the mean loss of this data rank's share of each batch, after each step."""
    for tokens in batches(steps, BATCH, SEQUENCE):
        mine = tokens.chunk(num_data)[data_rank]
        output = model(mine[:, :-1])
        logits = getattr(output, "logits", output)
        loss = F.cross_entropy(logits.flatten(0, 1), mine[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--hf", action="store_true")
    args = parser.parse_args()
    model = make_model(args.hf)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    autoshard.auto_parallelize(model, tp=args.tp, optimizer=optimizer)
    # ranks that differ in tp only see the same data: tp is the innermost axis of the mesh
    data_rank, num_data = dist.get_rank() // args.tp, dist.get_world_size() // args.tp
    for step, loss in enumerate(train(model, optimizer, args.steps, data_rank, num_data), 1):
        if dist.get_rank() == 0 and step % 10 == 0:
            print(f"step {step:4}  loss {loss:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
