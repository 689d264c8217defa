"""Shrink a config: the same kind of model, a few layers deep and 128 wide."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PretrainedConfig

from zoo.overrides import OVERRIDES, SUB_OVERRIDES
from zoo.sizes import (
    HEAD_DIM,
    HEAD_NAMES,
    HEADS,
    INNER,
    INNER_NAMES,
    KV_HEADS,
    KV_NAMES,
    LAYERS,
    VOCAB,
    Around,
    is_layers,
    is_token,
    small,
)

# where a config raises for a field, it has no one value for it (heterogeneous layers)
NO_VALUE = (AttributeError, RuntimeError, ValueError, KeyError, TypeError)


def shrink(config: Any, over: Mapping[str, Any], kv_heads: int | None = None) -> dict[str, Any]:
    """Return the arguments of ``type(config)`` for a tiny version of it."""
    kind = type(config)
    special = dict(OVERRIDES.get(kind.model_type, {}))
    if special.pop("__full__", None):
        special = {}
    special.update(over)
    values = _values(config)
    depth = _depth(values, special.pop("__layers__", None))
    heads = next((v for n, v in values.items() if HEAD_NAMES.fullmatch(n) and isinstance(v, int)), None)
    around = Around(depth, heads, kv_heads)
    made: dict[str, Any] = {}
    token = 20
    for name, value in values.items():
        if name in special or isinstance(value, (bool, PretrainedConfig)) or (value is None and name != "head_dim"):
            continue
        if name == "head_dim":
            made[name] = HEAD_DIM
        elif isinstance(value, int):
            size = small(name, value, around)
            if size is not None:
                made[name] = size
            elif is_token(name) and value >= VOCAB:
                made[name] = 0 if name == "pad_token_id" else VOCAB - token
                token += name != "pad_token_id"
        else:
            new = _container(name, value, values, depth)
            if new is not None:
                made[name] = new
    for alias, name in (kind.attribute_map or {}).items():
        if alias in made and name in made:
            made.pop(alias)
    if isinstance(values.get("moe_layers"), (list, tuple)):
        made["moe_layers"] = [depth - 1]
    for name, value in values.items():
        if isinstance(value, PretrainedConfig) and name not in special:
            inner = SUB_OVERRIDES.get((kind.model_type, name), {})
            made[name] = type(value)(**{**_changed(value), **shrink(value, inner, kv_heads)})
    return {**made, **special}


def field_names(kind: Any) -> list[str]:
    """Return the fields of a config class."""
    if dataclasses.is_dataclass(kind):
        return [field.name for field in dataclasses.fields(kind)]
    return [name for name in inspect.signature(kind.__init__).parameters if name not in ("self", "kwargs", "args")]


def _values(config: Any) -> dict[str, Any]:
    found = {}
    for name in field_names(type(config)):
        try:
            found[name] = getattr(config, name)
        except NO_VALUE:
            continue
    for name, value in list(config.__dict__.items()):
        if name not in found and isinstance(value, PretrainedConfig):
            found[name] = value
    return found


def _depth(values: Mapping[str, Any], wanted: int | None) -> int:
    """Return the number of layers: two, or one for each kind of layer."""
    kinds = values.get("layer_types")
    least = wanted or LAYERS
    if wanted is None and isinstance(kinds, (list, tuple)) and kinds:
        return max(least, len(set(map(str, kinds))))
    return least


def _container(name: str, value: Any, values: Mapping[str, Any], depth: int) -> Any:
    """Return a list or a dict for fewer layers and smaller sizes; None leaves the default."""
    if isinstance(value, dict):
        return shrink_rope(value) if name in ("rope_scaling", "rope_parameters") else None
    if not isinstance(value, (list, tuple)) or not value:
        return None
    full = next((v for n, v in values.items() if is_layers(n) and isinstance(v, int)), None)
    numbers = all(isinstance(item, int) and not isinstance(item, bool) for item in value)
    if full and len(value) == full and name != "rope_scaling":
        for names, size in ((INNER_NAMES, INNER), (HEAD_NAMES, HEADS), (KV_NAMES, KV_HEADS)):
            if numbers and names.fullmatch(name):
                return [size] * depth
        return _fewer(list(value), depth)
    if name in ("image_size", "img_size") and numbers:
        return [64 for _ in value]
    if name == "eos_token_id":
        return [item if item < VOCAB else VOCAB - 2 - index for index, item in enumerate(value)]
    if name in ("fullatt_block_indexes", "deepstack_visual_indexes", "global_attn_indexes"):
        return [depth - 1]
    return [item for item in value if item < depth] if name == "mlp_only_layers" else None


def _fewer(values: list[Any], depth: int) -> list[Any]:
    """Keep ``depth`` entries, one of each kind first, in their order."""
    kinds: list[Any] = []
    for value in values:
        if value not in kinds:
            kinds.append(value)
    if len(kinds) > depth:
        return values[:depth]
    indices = sorted(values.index(kind) for kind in kinds)
    made = [values[index] for index in indices]
    for extra in range(depth - len(made)):
        made.append(made[-1] if len(kinds) == 1 else values[(indices[-1] + 1 + extra) % len(values)])
    return made


def shrink_rope(value: Mapping[str, Any]) -> dict[str, Any]:
    """Shrink rotary parameters to the small head size."""
    made: dict[str, Any] = {}
    for name, item in value.items():
        if isinstance(item, dict):
            made[name] = shrink_rope(item)
        elif name == "mrope_section" and isinstance(item, Sequence):
            made[name] = [2, 3, 3] if len(item) == 3 else [2] * len(item)
        elif name in ("short_factor", "long_factor"):
            made[name] = [1.0] * (HEAD_DIM // 2)
        else:
            made[name] = item
    return made


def _changed(config: Any) -> dict[str, Any]:
    """Return the fields of an inner config that the outer one set: those that differ from the class's defaults."""
    try:
        default = type(config)()
    except NO_VALUE:
        return {}
    made = {}
    for name in field_names(type(config)):
        try:
            new, old = getattr(config, name), getattr(default, name)
        except NO_VALUE:
            continue
        if new != old and type(new) in (int, float, str, bool, list, tuple) and not name.startswith("_"):
            made[name] = new
    return made
