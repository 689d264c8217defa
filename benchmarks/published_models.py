"""Models of published sizes on the meta device: every number is of the model's published config, nothing is loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from diffusion import Diffusion
from published_kernels import FUSED_SINKS, route
from torch import Tensor, nn


@dataclass(frozen=True)
class Published:
    """One model.

    Attributes:
        build: makes it; called with meta as the device.
        billions: of parameters, as published.
        source: where the sizes and the count are from.
        dtype: of its parameters.
    """

    build: Callable[[], nn.Module]
    billions: float
    source: str
    dtype: torch.dtype = torch.bfloat16

    def on_meta(self) -> nn.Module:
        """Return the model without memory."""
        with torch.device("meta"), _default_dtype(self.dtype):
            return self.build()


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _of(kind: str, **sizes: Any) -> Callable[[], nn.Module]:
    """Return a builder of transformers' causal language model ``kind`` with a config of these sizes."""

    def build() -> nn.Module:
        # Llama-4's text model has a config class, but no line of its own among the causal ones
        config = getattr(transformers, f"{kind}Config")(use_cache=False, **sizes)
        name = {"GPT2": "GPT2LMHeadModel"}.get(kind, f"{kind.removesuffix('Text')}ForCausalLM")
        model: nn.Module = getattr(transformers, name)(config)
        return model

    return build


def _llama(hidden: int, wide: int, layers: int, heads: int) -> Callable[[], nn.Module]:
    return _of(
        "Llama",
        vocab_size=128256,
        hidden_size=hidden,
        intermediate_size=wide,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
    )


def _qwen3(hidden: int, wide: int, layers: int, heads: int, tied: bool) -> Callable[[], nn.Module]:
    return _of(
        "Qwen3",
        vocab_size=151936,
        hidden_size=hidden,
        intermediate_size=wide,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=tied,
    )


def _nemotron(hidden: int, wide: int, layers: int, heads: int, groups: int) -> Callable[[], nn.Module]:
    return _of(
        "Nemotron",
        vocab_size=256000,
        hidden_size=hidden,
        intermediate_size=wide,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=groups,
    )


def _gpt(hidden: int, layers: int, heads: int) -> Callable[[], nn.Module]:
    return _of("GPT2", vocab_size=51200, n_positions=2048, n_embd=hidden, n_layer=layers, n_head=heads)


def _oss(layers: int, experts: int) -> Callable[[], nn.Module]:
    return _of(
        "GptOss",
        vocab_size=201088,
        hidden_size=2880,
        intermediate_size=2880,
        num_hidden_layers=layers,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=64,
        num_local_experts=experts,
        num_experts_per_tok=4,
        attn_implementation=FUSED_SINKS,
    )


def _llama4_scout() -> nn.Module:
    make = _of(
        "Llama4Text",
        vocab_size=202048,
        hidden_size=5120,
        intermediate_size=8192,
        intermediate_size_mlp=16384,
        num_hidden_layers=48,
        num_attention_heads=40,
        num_key_value_heads=8,
        head_dim=128,
        num_local_experts=16,
        num_experts_per_tok=1,
    )
    return route(make())


class Lowered(nn.Module):
    """A frozen linear layer with a trained product of two thin ones beside it."""

    def __init__(self, base: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        self.scale = alpha / rank

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., in) to (..., out)."""
        return self.base(x) + self.scale * self.up(self.down(x))  # type: ignore[no-any-return]


def low_rank(build: Callable[[], nn.Module], rank: int = 8, alpha: float = 32) -> Callable[[], nn.Module]:
    """Return a builder of the model frozen, each linear layer of its blocks with a low-rank one beside it."""

    def wrapped() -> nn.Module:
        model = build()
        model.requires_grad_(False)
        for fqn, module in list(model.named_modules()):
            if isinstance(module, nn.Linear) and any(part.isdigit() for part in fqn.split(".")):
                parent, _, name = fqn.rpartition(".")
                setattr(model.get_submodule(parent), name, Lowered(module, rank, alpha))
        return model

    return wrapped


_HYBRID_47B = "M-M-M-M-M-M-M-M-M*-M-M-M-M-M-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-M-M---MM---M-M*-M-M-M-M-M-"
_KINDS = {"M": "linear_attention", "-": "mlp", "*": "full_attention"}

_LLAMA3 = "arXiv:2407.21783 table 3; config.json of meta-llama"
_GPT = "arXiv:2104.04473 table 1"

MODELS = {
    "Llama-3-8B": Published(_llama(4096, 14336, 32, 32), 8.03, _LLAMA3),
    "Llama-3-70B": Published(_llama(8192, 28672, 80, 64), 70.6, _LLAMA3),
    "Llama-3-405B": Published(_llama(16384, 53248, 126, 128), 405.0, _LLAMA3),
    # trained parts aside, the model is held as it is loaded
    "Llama-3-70B-LoRA": Published(
        low_rank(_llama(8192, 28672, 80, 64)), 70.6, "Llama-3-70B; rank 8, alpha 32: NeMo Automodel"
    ),
    "Qwen3-0.6B": Published(_qwen3(1024, 3072, 28, 16, True), 0.6, "config.json of Qwen/Qwen3-0.6B"),
    "Qwen3-32B": Published(_qwen3(5120, 25600, 64, 64, False), 32.8, "config.json of Qwen/Qwen3-32B"),
    "Qwen3-30B-A3B": Published(
        _of(
            "Qwen3Moe",
            vocab_size=151936,
            hidden_size=2048,
            intermediate_size=6144,
            moe_intermediate_size=768,
            num_hidden_layers=48,
            num_attention_heads=32,
            num_key_value_heads=4,
            head_dim=128,
            num_experts=128,
            num_experts_per_tok=8,
            norm_topk_prob=True,
        ),
        30.5,
        "config.json of Qwen/Qwen3-30B-A3B",
    ),
    "Llama-4-Scout": Published(
        _llama4_scout,
        109,
        "config.json of meta-llama/Llama-4-Scout-17B-16E, its text model; experts that are routed to",
    ),
    "GPT-OSS-20B": Published(_oss(24, 32), 20.9, "arXiv:2508.10925 table 1"),
    "GPT-OSS-120B": Published(_oss(36, 128), 116.8, "arXiv:2508.10925 table 1"),
    "Nemotron-3-8B": Published(_nemotron(4096, 16384, 32, 32, 32), 8.5, "NeMo nemotron3_8b: sum of its sizes"),
    "Nemotron-4-15B": Published(_nemotron(6144, 24576, 32, 48, 8), 15.7, "arXiv:2402.16819: 3.2 and 12.5"),
    "Nemotron-4-340B": Published(_nemotron(18432, 73728, 96, 96, 8), 341.0, "arXiv:2406.11704: 9.4 and 331.6"),
    "Nemotron-H-47B": Published(
        _of(
            "NemotronH",
            vocab_size=131072,
            hidden_size=8192,
            intermediate_size=30720,
            layers_block_type=[_KINDS[letter] for letter in _HYBRID_47B],
            num_attention_heads=64,
            num_key_value_heads=8,
            head_dim=128,
            ssm_state_size=256,
            mamba_num_heads=256,
            mamba_head_dim=64,
            n_groups=8,
        ),
        47,
        "NeMo NemotronHConfig47B; arXiv:2504.03624",
    ),
    "Mixtral-8x7B": Published(
        _of(
            "Mixtral",
            vocab_size=32000,
            hidden_size=4096,
            intermediate_size=14336,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=8,
            num_local_experts=8,
            num_experts_per_tok=2,
        ),
        46.7,
        "config.json of mistralai/Mixtral-8x7B-v0.1",
    ),
    "DeepSeek-V3": Published(
        _of(
            "DeepseekV3",
            vocab_size=129280,
            hidden_size=7168,
            intermediate_size=18432,
            moe_intermediate_size=2048,
            num_hidden_layers=61,
            num_attention_heads=128,
            num_key_value_heads=128,
            n_shared_experts=1,
            n_routed_experts=256,
            num_experts_per_tok=8,
            q_lora_rank=1536,
            kv_lora_rank=512,
            qk_rope_head_dim=64,
            qk_nope_head_dim=128,
            v_head_dim=128,
            n_group=8,
            topk_group=4,
            first_k_dense_replace=3,
            num_mtp_layers=0,
        ),
        671,
        "arXiv:2412.19437 section 4.2, without multi-token prediction",
    ),
    "GPT-1.7B": Published(_gpt(2304, 24, 24), 1.7, _GPT),
    "GPT-3.6B": Published(_gpt(3072, 30, 32), 3.6, _GPT),
    "GPT-7.5B": Published(_gpt(4096, 36, 32), 7.5, _GPT),
    "GPT-18.4B": Published(_gpt(6144, 40, 48), 18.4, _GPT),
    "GPT-3-175B": Published(_gpt(12288, 96, 96), 175, "arXiv:2005.14165 table 2.1"),
    "FLUX-dev-12B": Published(Diffusion, 12, "config.json of black-forest-labs/FLUX.1-dev"),
}
