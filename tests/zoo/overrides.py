"""What the rules of ``sizes`` do not get right, by type: test data.

``__layers__`` sets the number of layers; ``__full__`` takes the defaults with these values and shrinks nothing else.
"""

from __future__ import annotations

from typing import Any

from zoo.sizes import HIDDEN, VOCAB

_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_SWIN = {"image_size": 64, "patch_size": 4, "embed_dim": 32, "depths": [1, 1], "num_heads": [2, 4], "window_size": 4}
_SWIN4 = {
    **_SWIN,
    "embed_dim": 16,
    "depths": [1, 1, 1, 1],
    "num_heads": [2, 2, 2, 2],
    "out_features": ["stage1", "stage2", "stage3", "stage4"],
}
_SERIES = {"prediction_length": 4, "context_length": 8}
_TWO = {"num_experts_per_tok": 2}


def _detector(backbone: str) -> dict[str, Any]:
    return {
        "__full__": True,
        "use_timm_backbone": False,
        "use_pretrained_backbone": False,
        "backbone": None,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "backbone_config": backbone,
    }


#: by type and field of its config that holds another config
SUB_OVERRIDES: dict[tuple[str, str], dict[str, Any]] = {
    ("mask2former", "backbone_config"): _SWIN4,
    ("oneformer", "backbone_config"): _SWIN4,
    ("maskformer", "backbone_config"): _SWIN4,
    ("csm", "codec_config"): {"upsample_groups": 128},
    ("dia", "decoder_config"): {
        "cross_hidden_size": 128,
        "cross_num_attention_heads": 8,
        "cross_head_dim": 16,
        "cross_num_key_value_heads": 8,
    },
    ("clap", "audio_config"): {
        "patch_embeds_hidden_size": 16,
        "depths": [1, 1, 1, 1],
        "num_attention_heads": [2, 2, 2, 2],
        "hidden_size": 128,
    },
    ("sam", "vision_config"): {
        "output_channels": 128,
        "hidden_size": 128,
        "num_pos_feats": 64,
        "image_size": 64,
        "patch_size": 8,
        "mlp_dim": 256,
    },
    ("sam", "prompt_encoder_config"): {"image_size": 64, "patch_size": 8},
}

_PLANNED: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {
        "num_key_value_heads": 4,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {"sliding_attention": _ROPE, "full_attention": _ROPE},
    },
    "deepseek_ocr2_text": {**_TWO, "mlp_layer_types": ["dense", "sparse"], "moe_intermediate_size": 64},
    "deepseek_v2": {**_TWO, "first_k_dense_replace": 1},
    "unlimited_ocr_text": _TWO,
    "diffusion_gemma_text": {"num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 64},
    "gemma4_text": {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 64},
    "dots1": {**_TWO, "n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "dots3_note_vision_encoder": {**_TWO, "adapter_in_dim": HIDDEN, "adapter_out_dim": HIDDEN},
    "falcon_h1": {"mamba_d_ssm": 256, "mamba_n_heads": 16, "mamba_d_head": 16, "mamba_n_groups": 1},
    "gemma3n_text": {
        "num_kv_shared_layers": 0,
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "__layers__": 2,
        "laurel_rank": 16,
        "hidden_size_per_layer_input": 32,
        "vocab_size_per_layer_input": VOCAB,
        "intermediate_size": 256,
        "activation_sparsity_pattern": [0.0, 0.0],
    },
    "glm5_next_text": {"index_topk": 16, "head_dim": 0, "qk_rope_head_dim": 0},
    "nemotron": {"num_key_value_heads": 4},
    "qwen3_omni_moe_talker_text": {"shared_expert_intermediate_size": 64},
    "qwen4_exp_text": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
        "ngram_vocab_size_base": 1000,
        "split_ngram_parts": 2,
        "make_ngram_vocab_size_divisible_by": 8,
        "hc_lowrank": 32,
        "ple_layer_ids": [1],
        "ple_embed_dim": 64,
        "eos_token_id": 2,
    },
    "step3p5": {"sliding_window": 8, "num_sliding_attention_heads": 8},
    "t5gemma2_decoder": {"dropout_rate": 0.0},
    "t5gemma2_text": {"dropout_rate": 0.0},
    "t5_gemma_module": {"dropout_rate": 0.0},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "hunyuan_vl_text": {"rope_parameters": {**_ROPE, "mrope_section": [2, 2, 2, 2]}},
    "gemma4_vision": {"pooling_kernel_size": 2, "position_embedding_size": 64},
    "llama4_vision_model": {
        "vision_output_dim": HIDDEN,
        "projector_input_dim": HIDDEN,
        "projector_output_dim": HIDDEN,
        "intermediate_size": 512,
    },
}

_OTHERS: dict[str, dict[str, Any]] = {
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2},
    "mamba2": {"num_heads": 16, "head_dim": 16, "n_groups": 1, "state_size": 16, "chunk_size": 16},
    "esm": {"vocab_size": 64, "mask_token_id": 32, "pad_token_id": 1},
    "swin": _SWIN,
    "swinv2": _SWIN,
    "donut-swin": _SWIN,
    "efficientnet": {  # b0; the defaults are b7
        "__full__": True,
        "image_size": 64,
        "width_coefficient": 1.0,
        "depth_coefficient": 1.0,
        "hidden_dim": 1280,
    },
    "levit": {"__full__": True},
    "align": {"__full__": True},
    "layoutlmv3": {"coordinate_size": 24, "shape_size": 16, "hidden_size": 128, "visual_embed": False},
    "lilt": {"hidden_size": 192, "num_attention_heads": 8, "intermediate_size": 256},
    "blip-2": {"image_token_index": VOCAB - 10},
    "bros": {"dim_bbox": 8},
    "wav2vec2-conformer": {"vocab_size": 32},
    "wav2vec2-bert": {"vocab_size": 32},
    "speech_to_text": {"max_source_positions": 256, "conv_channels": 64},
    "time_series_transformer": _SERIES,
    "informer": _SERIES,
    "autoformer": {**_SERIES, "label_length": 4, "moving_average": 3},
    "dpt": {
        "num_hidden_layers": 4,
        "__layers__": 4,
        "backbone_out_indices": [0, 1, 2, 3],
        "neck_hidden_sizes": [16, 16, 32, 32],
        "fusion_hidden_size": 32,
    },
    "zamba": {
        "num_hidden_layers": 5,
        "__layers__": 5,
        "layers_block_type": ["mamba", "mamba", "hybrid", "mamba", "hybrid"],
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "mamba_dt_rank": 8,
        "n_mamba_heads": 2,
        "attention_hidden_size": 256,
        "attention_head_dim": 32,
    },
    "rt_detr": {
        "__full__": True,
        "decoder_layers": 2,
        "num_queries": 20,
        "encoder_ffn_dim": 128,
        "decoder_ffn_dim": 128,
        "num_denoising": 0,
    },
    "detr": _detector("one stage"),
    "conditional_detr": _detector("one stage"),
    "deformable_detr": _detector("three stages"),
    "decision_transformer": {"hidden_size": 128, "max_ep_len": 64},
    "patchtst": {
        "d_model": 64,
        "num_input_channels": 3,
        "context_length": 32,
        "patch_length": 8,
        "patch_stride": 8,
    },
    "perceiver": {
        "num_latents": 16,
        "d_latents": 128,
        "d_model": 128,
        "num_self_attends_per_block": 2,
        "num_blocks": 1,
        "vocab_size": VOCAB,
        "max_position_embeddings": 64,
        "qk_channels": 64,
        "v_channels": 128,
    },
    "vitmatte": {"fusion_hidden_sizes": [32, 32, 16, 8], "hidden_size": 128},
}

OVERRIDES: dict[str, dict[str, Any]] = {**_PLANNED, **_OTHERS}
