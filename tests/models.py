"""Small models of our own, and tiny Hugging Face ones, that the tests plan and train."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from replace_models import Language, Translation
from rewritten import Nano
from torch import Tensor, nn

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class Attention(nn.Module):
    """Grouped heads; optionally its own residual and norms over each head of q and k."""

    def __init__(
        self, width: int = 32, heads: int = 4, kv_heads: int = 2, head_norm: bool = False, residual: bool = False
    ) -> None:
        super().__init__()
        self.head_dim = width // heads
        self.q = nn.Linear(width, width)
        self.k = nn.Linear(width, kv_heads * self.head_dim)
        self.v = nn.Linear(width, kv_heads * self.head_dim)
        self.o = nn.Linear(width, width)
        self.q_norm = Norm(self.head_dim) if head_norm else nn.Identity()
        self.k_norm = Norm(self.head_dim) if head_norm else nn.Identity()
        self.residual = residual

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = (p(x).view(b, s, -1, self.head_dim).transpose(1, 2) for p in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v, is_causal=True, enable_gqa=True)
        y = self.o(y.transpose(1, 2).flatten(2))
        out: Tensor = x + y if self.residual else y
        return out


class Mlp(nn.Module):
    def __init__(self, width: int = 32, inner: int = 48) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, inner), nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.attention, self.mlp = Attention(**options), Mlp()
        self.norm1, self.norm2 = Norm(32), Norm(32)
        self.inside = options.get("residual", False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.attention(self.norm1(x))
        x = y if self.inside else x + y
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]


class Decoder(nn.Module):
    """Embedding, blocks, norm, head; everything with biases, so that those are proved too."""

    def __init__(self, vocab: int = 24, layers: int = 2, tied: bool = False, **options: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, 32)
        self.blocks = nn.ModuleList(Block(**options) for _ in range(layers))
        self.norm = Norm(32)
        self.head = nn.Linear(32, vocab, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def hf(kind: str, **options: Any) -> nn.Module:
    """A tiny Hugging Face causal model, its config otherwise in the default state."""
    import transformers

    sizes = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0,
    }  # fmt: skip
    config = getattr(transformers, f"{kind}Config")(**{**sizes, **options})
    return transformers.AutoModelForCausalLM.from_config(config)  # type: ignore[no-any-return]


MODELS: dict[str, Callable[[], nn.Module]] = {
    "decoder": Decoder,
    "residual inside": lambda: Decoder(residual=True, layers=1),
    "head norms": lambda: Decoder(head_norm=True),
    "tied": lambda: Decoder(tied=True),
    "llama": lambda: hf("Llama"),
    "llama tied": lambda: hf("Llama", tie_word_embeddings=True),
    "qwen3": lambda: hf("Qwen3"),
    "mistral": lambda: hf("Mistral"),
    "gemma2": lambda: hf("Gemma2"),
    "torch encoder": Language,
    "torch transformer": Translation,
    "nano": Nano,
}


def build(name: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    """Build a model with every value random: ones and zeros would hide a wrong gradient."""
    torch.manual_seed(0)
    model = MODELS[name]().to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def logits_of(answer: Any) -> Tensor:
    """Return the logits of a model's answer."""
    return answer if isinstance(answer, Tensor) else answer.logits


def token_loss(answer: Any, ids: Tensor) -> Tensor:
    """Return the mean loss of predicting each next token."""
    logits = logits_of(answer)
    return F.cross_entropy(logits[:, :-1].reshape(-1, logits.shape[-1]), ids[:, 1:].reshape(-1))
