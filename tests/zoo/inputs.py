"""Example inputs by type: from the forward's signature, or from a table where that says too little."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from zoo.sizes import HIDDEN, LENGTH

_TOWERS = """
clip siglip siglip2 blip chinese_clip clipseg altclip align groupvit x_clip owlvit owlv2 flava metaclip_2 clap
instructblip
""".split()
_MAIN = ("pixel_values", "input_features", "input_values", "inputs_embeds", "hidden_states")


def example_inputs(model: Any, model_type: str, batch: int = 2, length: int = LENGTH) -> dict[str, Any]:
    """Return keyword arguments on which the model's forward runs.

    Raises:
        NotImplementedError: nothing is known of the type's main input.
    """
    if model_type in _INPUTS:
        found: dict[str, Any] = _INPUTS[model_type](model)
        return found
    names = inspect.signature(model.forward).parameters
    main = getattr(model, "main_input_name", "input_ids")
    main = main if isinstance(main, str) else main[0]
    if main == "input_ids" and main not in names:
        main = next((name for name in _MAIN if name in names), main)
    made: dict[str, Any] = {main: _main(model.config, main, batch, length, list(names))}
    if "decoder_input_ids" in names:
        made["decoder_input_ids"] = _ids(8, batch)
    if model_type in _TOWERS and "pixel_values" in names and "input_ids" in names:
        made |= {"input_ids": _ids(length, batch), "pixel_values": _normal(batch, *_image(model.config))}
    return made


def _main(config: Any, name: str, batch: int, length: int, names: list[str]) -> Tensor:
    if name == "input_ids":
        return _ids(length, batch)
    if name == "pixel_values":
        return _normal(batch, *_image(config))
    if name == "pixel_values_videos":
        return _normal(batch, getattr(config, "num_frames", 4), *_image(config))
    if name == "input_features":
        bins = getattr(config, "num_mel_bins", None) or getattr(config, "feature_projection_input_dim", None) or 80
        return _normal(batch, bins, 2 * getattr(config, "max_source_positions", 64))
    if name == "input_values":
        return _normal(batch, 4000)
    if name == "inputs_embeds":
        return _normal(batch, length, getattr(config, "hidden_size", HIDDEN))
    raise NotImplementedError(f"main input {name} of forward({', '.join(names)})")


def _image(config: Any) -> tuple[int, int, int]:
    """Return channels, height and width."""
    inner = config
    for name in ("vision_config", "backbone_config", "image_config"):
        if isinstance(getattr(config, name, None), PretrainedConfig):
            inner = getattr(config, name)
    size: Any = getattr(inner, "image_size", None) or getattr(config, "image_size", None) or 64
    if isinstance(size, dict):
        size = (size.get("height", 64), size.get("width", 64))
    high, wide = (size[0], size[-1]) if isinstance(size, (list, tuple)) else (size, size)
    channels = next((getattr(inner, n) for n in ("num_channels", "in_channels", "in_chans") if hasattr(inner, n)), 3)
    return channels or 3, high, wide


def _seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _ids(length: int = LENGTH, batch: int = 2, low: int = 5, high: int = 100) -> Tensor:
    return torch.randint(low, high, (batch, length), generator=_seeded())


def _normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=_seeded())


def _ones(*shape: int) -> Tensor:
    return torch.ones(*shape, dtype=torch.long)


def _grid() -> Tensor:
    return torch.tensor([[1, 4, 4]])


def _boxes() -> Tensor:
    return torch.rand(2, LENGTH, 4, generator=_seeded()).cumsum(-1) / 4


def _square(config: Any) -> Tensor:
    return _normal(2, 3, config.image_size, config.image_size)


def _series(model: Any) -> dict[str, Any]:
    config = model.config
    past, future = config.context_length + max(config.lags_sequence), config.prediction_length
    return {
        "past_values": _normal(2, past),
        "past_time_features": _normal(2, past, config.num_time_features),
        "past_observed_mask": torch.ones(2, past),
        "future_values": _normal(2, future),
        "future_time_features": _normal(2, future, config.num_time_features),
    }


def _video(model: Any) -> dict[str, Any]:
    return {"pixel_values": _normal(2, model.config.num_frames, 3, 64, 64)}


def _query_image(model: Any) -> dict[str, Any]:
    marks = torch.full((2, model.config.num_query_tokens), model.config.image_token_index)
    return {"input_ids": torch.cat([marks, _ids(8)], 1), "pixel_values": _square(model.config.vision_config)}


def _latent_image(model: Any) -> dict[str, Any]:
    latents = model.config.latent_query_num
    return {
        "input_ids": _ids(latents + 4),
        "pixel_values": _square(model.config.vision_config),
        "image_embeds_position_mask": torch.cat([torch.ones(2, latents), torch.zeros(2, 4)], 1).long(),
    }


def _flat_patches(model: Any) -> dict[str, Any]:
    places = torch.arange(1, 17).view(1, 16, 1).float().expand(2, -1, 2)
    patches = _normal(2, 16, model.config.vision_config.patch_embed_hidden_size)
    return {"flattened_patches": torch.cat([places, patches], -1), "decoder_input_ids": _ids(8)}


def _decisions(model: Any) -> dict[str, Any]:
    return {
        "states": _normal(2, 8, model.config.state_dim),
        "actions": _normal(2, 8, model.config.act_dim),
        "rewards": _normal(2, 8, 1),
        "returns_to_go": _normal(2, 8, 1),
        "timesteps": torch.arange(8).expand(2, -1).contiguous(),
        "attention_mask": _ones(2, 8),
    }


def _masked(model: Any) -> dict[str, Any]:
    return {"input_ids": _ids(), "attention_mask": _ones(2, LENGTH), "decoder_input_ids": _ids(8)}


def _patches(name: str, per_image: Callable[[Any], int]) -> Callable[[Any], dict[str, Any]]:
    return lambda m: {name: _normal(16, per_image(m.config)), "grid_thw": _grid()}


def _placed_patches(model: Any) -> dict[str, Any]:
    places = torch.stack(torch.meshgrid(torch.arange(4), torch.arange(4), indexing="xy"), -1)
    return {
        "pixel_values": _normal(2, 16, 3 * model.config.patch_size**2),
        "pixel_position_ids": places.reshape(1, 16, 2).expand(2, -1, -1).contiguous(),
    }


def _noise(model: Any) -> dict[str, Any]:
    block = model.config.block_size
    return {
        "noise_embeds": _normal(2, block, HIDDEN),
        "context_hidden_states": _normal(2, 8, HIDDEN * len(model.config.target_layer_ids)),
        "attention_mask": _ones(2, 8 + block),
    }


def _image_tokens(model: Any) -> dict[str, Any]:
    marks = torch.full((2, 16), model.config.image_token_id)
    # return_dict=True fails in the model's own code
    return {
        "input_ids": torch.cat([_ids(12), marks], 1),
        "pixel_values": _normal(2, 3, 64, 64),
        "return_dict": False,
    }


def _two_towers(model: Any) -> dict[str, Any]:
    return {"input_ids": _ids(), "pixel_values": _normal(2, 3, 64, 64)}


def _flat_tower(model: Any) -> dict[str, Any]:
    return {
        "input_ids": _ids(),
        "pixel_values": _normal(2, 16, 3 * model.config.vision_config.patch_size**2),
        "pixel_attention_mask": _ones(2, 16),
        "spatial_shapes": torch.tensor([[4, 4], [4, 4]]),
    }


def _sound_and_text(model: Any) -> dict[str, Any]:
    return {
        "input_ids": _ids(),
        "input_features": _normal(2, 1, 1001, 64),
        "is_longer": torch.tensor([[False], [False]]),
    }


def _codes(model: Any) -> dict[str, Any]:
    codes = torch.randint(5, 100, (2, 8, model.config.decoder_config.num_channels), generator=_seeded())
    return {"input_ids": _ids(), "decoder_input_ids": codes}


_INPUTS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "layoutlmv3": lambda m: {"input_ids": _ids(), "bbox": _ids(4 * LENGTH, low=0).view(2, LENGTH, 4).cumsum(-1)},
    "bros": lambda m: {"input_ids": _ids(), "bbox": torch.rand(2, LENGTH, 8, generator=_seeded())},
    "vivit": _video,
    "timesformer": _video,
    "videomae": _video,
    "align": _two_towers,
    "aimv2": _two_towers,
    "siglip2": _flat_tower,
    "blip-2": _query_image,
    "vilt": lambda m: {**_two_towers(m), "pixel_mask": _ones(2, 64, 64)},
    "oneformer": lambda m: {"pixel_values": _normal(2, 3, 64, 64), "task_inputs": _ones(2, 77)},
    "speech_to_text": lambda m: {"input_features": _normal(2, 64, 80), "decoder_input_ids": _ids(8)},
    "clap": _sound_and_text,
    "encodec": lambda m: {"input_values": _normal(2, 1, 4800)},
    "audio-spectrogram-transformer": lambda m: {"input_values": _normal(2, m.config.max_length, m.config.num_mel_bins)},
    "decision_transformer": _decisions,
    "patchtst": lambda m: {"past_values": _normal(2, m.config.context_length, m.config.num_input_channels)},
    "perceiver": lambda m: {"inputs": _ids()},
    "kosmos-2": _latent_image,
    "wav2vec2-bert": lambda m: {"input_features": _normal(2, 32, m.config.feature_projection_input_dim)},
    "pix2struct": _flat_patches,
    "longt5": _masked,
    "switch_transformers": lambda m: {**_masked(m), "decoder_attention_mask": _ones(2, 8)},
    "udop": lambda m: {**_masked(m), "bbox": _boxes()},
    "musicgen": lambda m: {
        "input_ids": _ids(),
        "decoder_input_ids": _ids(8, batch=2 * m.config.decoder.num_codebooks),
    },
    "dia": _codes,
    "esm": lambda m: {"input_ids": _ids(high=30)},
    "time_series_transformer": _series,
    "informer": _series,
    "autoformer": _series,
    "detr": lambda m: {"pixel_values": _normal(1, 3, 64, 64)},
    "conditional_detr": lambda m: {"pixel_values": _normal(1, 3, 64, 64)},
    "deformable_detr": lambda m: {"pixel_values": _normal(1, 3, 128, 128)},
    "rt_detr": lambda m: {"pixel_values": _normal(1, 3, 128, 128)},
    "deepseek_ocr2_encoder": lambda m: {"inputs_embeds": _normal(2, LENGTH, HIDDEN), "num_patches": 8},
    "ernie4_5_vl_moe_vision": _patches("hidden_states", lambda c: 3 * c.patch_size**2),
    "dots3_note_vision_encoder": _patches("pixel_values", lambda c: 3 * c.patch_size**2),
    "muse_glimmer_vision": _patches("pixel_values", lambda c: c.patch_temporal * 3 * c.patch_size**2),
    "gemma4_vision": _placed_patches,
    "muse_glimmer_assistant": _noise,
    "qwen3_omni_moe_talker_text": lambda m: {"inputs_embeds": _normal(2, LENGTH, HIDDEN)},
    "qwen3_omni_moe_talker_code_predictor": lambda m: {"inputs_embeds": _normal(2, LENGTH, HIDDEN)},
    "t5gemma2_decoder": lambda m: {"input_ids": _ids(), "encoder_hidden_states": _normal(2, 8, HIDDEN)},
    "voxtral_realtime_text": lambda m: {"input_ids": _ids(), "t_cond": _normal(2, 1, HIDDEN)},
    "llama4": _image_tokens,
}
