"""Tiny configs by type."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

from transformers import PretrainedConfig

from zoo.classes import ROOT, config_class
from zoo.overrides import OVERRIDES
from zoo.shrink import NO_VALUE, shrink

_STAGES = {"one stage": ["stage4"], "three stages": ["stage2", "stage3", "stage4"]}


def tiny_config(model_type: str, kv_heads: int | None = None, **over: Any) -> Any:
    """Return a tiny config: in its default state but for sizes and the cache."""
    kind = config_class(model_type)
    fixed = OVERRIDES.get(model_type, {})
    if fixed.get("__full__"):
        arguments = {k: v for k, v in {**fixed, **over}.items() if not k.startswith("__")}
        if isinstance(arguments.get("backbone_config"), str):
            arguments["backbone_config"] = _resnet(_STAGES[arguments["backbone_config"]])
    else:
        arguments = shrink(kind(), over, kv_heads)
    config = kind(**arguments)
    if model_type == "dbrx":
        config.attn_config.rope_theta = 10000.0
        config.attn_config.clip_qkv = 8.0
    for inner in _nested(config):
        _fix_sections(inner)
        _switch_cache_off(inner)
    return config


def _resnet(stages: list[str]) -> Any:
    from transformers import ResNetConfig

    return ResNetConfig(
        embedding_size=16, hidden_sizes=[16, 32, 64, 128], depths=[1, 1, 1, 1], layer_type="basic", out_features=stages
    )


def _nested(config: Any) -> Iterator[Any]:
    """Yield a config and every config inside it, each once."""
    seen: set[int] = set()
    waiting = [config]
    while waiting:
        each = waiting.pop()
        if id(each) not in seen:
            seen.add(id(each))
            yield each
            waiting += [value for value in each.__dict__.values() if isinstance(value, PretrainedConfig)]


def _switch_cache_off(config: Any) -> None:
    """A cache would hold a rank's own heads: it is another test's business."""
    if hasattr(config, "use_cache"):
        config.use_cache = False


@cache
def _has_sections(package: str) -> bool:
    return any("mrope_section" in file.read_text() for file in (ROOT / package).glob("modeling_*.py"))


def _fix_sections(config: Any) -> None:
    """Let the sections of multi-axis rotary embeddings add up to the small head size."""
    rope = getattr(config, "rope_parameters", None)
    attention = _has(config, "num_attention_heads") and _has(config, "vocab_size")
    if not isinstance(rope, dict) or not attention or not _has_sections(type(config).__module__.split(".")[2]):
        return
    if "rope_type" not in rope and "rope_theta" not in rope:
        for inner in rope.values():
            if isinstance(inner, dict):
                inner["mrope_section"] = _sections(config, inner)
    elif len(rope.get("mrope_section") or [0, 0, 0]) == 3:
        rope["mrope_section"] = _sections(config, rope)


def _sections(config: Any, rope: dict[str, Any]) -> list[int]:
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    share = rope.get("partial_rotary_factor") or getattr(config, "partial_rotary_factor", None) or 1.0
    pairs = int(size * share) // 2
    first = max(1, round(pairs * 0.34))
    return [first, first, pairs - 2 * first]


def _has(config: Any, name: str) -> bool:
    try:
        return hasattr(config, name)
    except NO_VALUE:
        return False
