"""Which fields of a config hold which kind of size, and how small each becomes."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER, VOCAB, LAYERS, EXPERTS, LENGTH = 128, 8, 4, 16, 256, 512, 2, 8, 16


def _names(text: str) -> re.Pattern[str]:
    return re.compile("|".join(text.split()))


_LAYERS = _names("""
num_hidden_layers n_layers? num_layers encoder_layers decoder_layers num_encoder_layers num_decoder_layers
encoder_num_hidden_layers decoder_num_hidden_layers depth num_encoder_blocks_ num_hidden_blocks encoder_num_layers
decoder_num_layers num_blocks memory_attention_num_layers resampler_depth memory_fuser_num_layers text_layers
vision_layers n_decoder_layers n_encoder_layers audio_depth
""")
_HIDDEN = _names("""
hidden_size d_model n_embd embed_dim embedding_size dim model_dim word_embed_proj_dim encoder_hidden_size
decoder_hidden_size out_hidden_size projection_dim text_hidden_size vision_hidden_size hidden_dim text_embed_dim
text_config_hidden n_embed emb_dim encoder_hidden_dim decoder_hidden_dim projector_hidden_size pooler_output_size
embedding_dim output_hidden_size projector_dim dim_model qformer_hidden_size cross_attention_hidden_size
audio_hidden_size vision_output_dim projector_output_dim fc_hidden_size text_projection_dim backbone_hidden_size
""")
INNER_NAMES = _names("""
intermediate_size ffn_dim d_ff n_inner encoder_ffn_dim decoder_ffn_dim mlp_dim dim_feedforward ffn_hidden_size
decoder_intermediate_size encoder_intermediate_size intermediate_size_mlp projector_input_dim feedforward_size dim_ff
dense_intermediate_size projector_ffn_hidden_size feed_forward_dim ffn_intermediate_size
""")
HEAD_NAMES = _names("""
num_attention_heads n_heads? num_heads encoder_attention_heads decoder_attention_heads attention_heads num_heads_int
encoder_num_attention_heads decoder_num_attention_heads swa_num_attention_heads memory_attention_num_attention_heads
num_attn_heads swa_num_attn_heads num_global_attention_heads num_image_attention_heads
""")
KV_NAMES = _names("""
num_key_value_heads num_kv_heads n_head_kv swa_num_key_value_heads multi_query_group_num num_global_key_value_heads
swa_num_kv_heads decoder_num_key_value_heads encoder_num_key_value_heads n_kv_heads
""")
_HEAD_DIM = _names("""
head_dim d_kv swa_head_dim kv_channels attention_head_dim global_head_dim v_head_dim qk_nope_head_dim qk_rope_head_dim
swa_v_head_dim head_size mamba_d_head mamba_head_dim linear_key_head_dim linear_value_head_dim index_head_dim
linear_head_dim attn_head_dim dim_head swa_qk_head_dim
""")
_EXPERT_INNER = _names("""
moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size shared_intermediate_size
moe_ffn_hidden_size moe_shared_expert_intermediate_size expert_intermediate_size moe_dim expert_dim
moe_shared_intermediate_size share_expert_dim moe_latent_size
""")
_EXPERTS = _names("""
num_experts num_local_experts n_routed_experts moe_num_experts num_routed_experts n_experts num_moe_experts
""")
_CHOSEN = _names("""
num_experts_per_tok moe_topk moe_k moe_top_k top_k_experts num_selected_experts num_experts_per_token
n_activated_experts experts_per_token moe_num_active_experts
""")
_VOCAB = re.compile(r"(\w*_)?(vocab_size|n_vocab|src_vocab_size|tgt_vocab_size)(_\w*)?")
_POSITIONS = _names("""
max_position_embeddings n_positions max_source_positions max_target_positions seq_length max_seq_len max_seq_length
max_sequence_length context_length n_ctx original_max_position_embeddings max_text_len
max_encoder_position_embeddings max_decoder_position_embeddings max_length
""")
_ONE = _names("n_group topk_group moe_n_group num_expert_groups expert_group_num")
_DENSE = _names("""
first_k_dense_replace moe_layer_start_index num_dense_layers first_dense_layers num_first_dense_layers dense_layers
n_dense_first_layers
""")
_WINDOW = _names("""
sliding_window sliding_window_size window_size local_attention attention_window_size attention_chunk_size index_topk
""")
_AT_MOST = {
    "q_lora_rank": 64, "kv_lora_rank": 32, "o_lora_rank": 32, "index_n_heads": 4, "linear_num_key_heads": 4,
    "linear_num_value_heads": 8, "mamba_n_heads": 16, "mamba_num_heads": 16, "linear_num_heads": 8,
    "num_linear_heads": 8, "hidden_size_per_layer_input": 32, "mamba_dt_rank": 8, "time_step_rank": 8,
    "attention_hidden_size": HIDDEN, "state_size": 16, "linear_num_key_value_heads": 4, "dt_rank": 8,
    "num_frames": 4, "num_mel_bins": 80,
}  # fmt: skip


@dataclass(frozen=True)
class Around:
    """What a field's size depends on: the layers, the heads in the default config, and the wanted kv heads."""

    layers: int
    heads: int | None
    kv_heads: int | None


def _kv(value: int, around: Around) -> int:
    if around.kv_heads:
        return around.kv_heads
    return 1 if value == 1 else HEADS if value == around.heads else KV_HEADS


Small = Callable[[int, Around], int]
# in this order: the first name that fits decides
_RULES: list[tuple[re.Pattern[str], Small]] = [
    (_LAYERS, lambda v, a: a.layers),
    (re.compile("type_vocab_size"), lambda v, a: v),
    (_VOCAB, lambda v, a: VOCAB),
    (HEAD_NAMES, lambda v, a: HEADS),
    (KV_NAMES, _kv),
    (_HEAD_DIM, lambda v, a: HEAD_DIM),
    (INNER_NAMES, lambda v, a: INNER),
    (_EXPERT_INNER, lambda v, a: 64 if v else v),
    (_EXPERTS, lambda v, a: min(v, EXPERTS) if v > 1 else v),
    (_CHOSEN, lambda v, a: min(v, 2)),
    (_HIDDEN, lambda v, a: HIDDEN),
    (_POSITIONS, lambda v, a: min(v, 512)),
    (_ONE, lambda v, a: 1),
    (_DENSE, lambda v, a: min(v, 1)),
    (re.compile("rotary_dim"), lambda v, a: HEAD_DIM // 2),
    (_WINDOW, lambda v, a: min(v, 8)),
    (re.compile("image_size"), lambda v, a: min(v, 64)),
    (re.compile("patch_size"), lambda v, a: min(v, 8)),
]


def small(name: str, value: int, around: Around) -> int | None:
    """Return the small size of a field, None where it is no size."""
    for names, rule in _RULES:
        if names.fullmatch(name):
            return rule(value, around)
    return min(value, _AT_MOST[name]) if name in _AT_MOST else None


def is_layers(name: str) -> bool:
    """Whether a field says how many layers there are."""
    return _LAYERS.fullmatch(name) is not None


def is_token(name: str) -> bool:
    """Whether a field is the number of a token."""
    return re.search(r"(_token_id|_token_index|_id|token_id_\w+)$", name) is not None
