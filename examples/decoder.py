"""A decoder in plain PyTorch: nothing here knows about autoshard.

Shapes in comments: b batch, s sequence, c hidden, h query heads, k key/value heads, d head size, f inner features.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class DecoderConfig:
    vocab: int = 32000
    hidden: int = 2048
    inner: int = 5632
    layers: int = 16
    heads: int = 16
    kv_heads: int = 4
    rope_theta: float = 10000.0
    eps: float = 1e-5

    @property
    def head_size(self) -> int:
        return self.hidden // self.heads


class Norm(nn.Module):
    """Root-mean-square norm over the last dim."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * (x.float() * scale).type_as(x)


def rotary(x: Tensor, theta: float) -> Tensor:
    """Rotate pairs of features by their position; x is (b, heads, s, d)."""
    sequence, size = x.shape[-2:]
    frequencies = theta ** (-torch.arange(0, size, 2, device=x.device).float() / size)  # (d / 2,)
    angles = torch.outer(torch.arange(sequence, device=x.device).float(), frequencies)  # (s, d / 2)
    cos, sin = torch.cat((angles.cos(),) * 2, -1), torch.cat((angles.sin(),) * 2, -1)  # (s, d)
    first, second = x.float().chunk(2, -1)
    return (x.float() * cos + torch.cat((-second, first), -1) * sin).type_as(x)


class Attention(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.head_size, self.theta = config.head_size, config.rope_theta
        self.groups = config.heads // config.kv_heads
        self.query = nn.Linear(config.hidden, config.heads * config.head_size, bias=False)
        self.key = nn.Linear(config.hidden, config.kv_heads * config.head_size, bias=False)
        self.value = nn.Linear(config.hidden, config.kv_heads * config.head_size, bias=False)
        self.output = nn.Linear(config.heads * config.head_size, config.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q = self.query(x).view(b, s, -1, self.head_size).transpose(1, 2)  # (b, h, s, d)
        k = self.key(x).view(b, s, -1, self.head_size).transpose(1, 2)  # (b, k, s, d)
        v = self.value(x).view(b, s, -1, self.head_size).transpose(1, 2)
        k, v = (t.repeat_interleave(self.groups, 1) for t in (rotary(k, self.theta), v))  # (b, h, s, d)
        y = F.scaled_dot_product_attention(rotary(q, self.theta), k, v, is_causal=True)
        return self.output(y.transpose(1, 2).reshape(b, s, -1))


class GatedMLP(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.hidden, config.inner, bias=False)
        self.up = nn.Linear(config.hidden, config.inner, bias=False)
        self.down = nn.Linear(config.inner, config.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.attention_norm = Norm(config.hidden, config.eps)
        self.attention = Attention(config)
        self.mlp_norm = Norm(config.hidden, config.eps)
        self.mlp = GatedMLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Decoder(nn.Module):
    """Tokens (b, s) to logits (b, s, vocab)."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocab, config.hidden)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = Norm(config.hidden, config.eps)
        self.head = nn.Linear(config.hidden, config.vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)  # (b, s, c)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def make_decoder() -> Decoder:
    """The model that `autoshard explain examples/decoder.py` reads: 0.8 billion parameters."""
    return Decoder(DecoderConfig())
