"""Inputs of transformers models are found without a table of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autoshard.inputs import example_inputs, materialise
from autoshard.twin import make_twin


@pytest.fixture(scope="module")
def transformers() -> Any:
    module = pytest.importorskip("transformers")
    module.logging.set_verbosity_error()
    return module


_SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
_SEQ2SEQ = {
    "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "vocab_size": 128, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip
_TEXT = {"vocab_size": 100, **_SMALL}
_AUDIO = {"vocab_size": 32, "conv_dim": (32, 32), "conv_stride": (5, 2), "conv_kernel": (10, 3),
          "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 16, **_SMALL}  # fmt: skip
_IDS = {"input_ids", "attention_mask"}
_DECODER = {"decoder_input_ids", "decoder_attention_mask"}
_T5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 2, "vocab_size": 128}
_IMAGE = {"image_size": 32, "patch_size": 8, **_SMALL}
_MEL = {"max_source_positions": 60, "max_target_positions": 40, "num_mel_bins": 20, **_SEQ2SEQ}
HF: list[tuple[str, str, dict[str, Any], set[str]]] = [
    ("LlamaForCausalLM", "LlamaConfig", {"num_key_value_heads": 2, **_TEXT}, _IDS),
    ("MixtralForCausalLM", "MixtralConfig", {"num_key_value_heads": 2, "num_local_experts": 4, **_TEXT}, _IDS),
    ("BertForMaskedLM", "BertConfig", _TEXT, _IDS),
    ("T5ForConditionalGeneration", "T5Config", _T5, _IDS | _DECODER),
    ("BartForConditionalGeneration", "BartConfig", {"max_position_embeddings": 64, **_SEQ2SEQ}, _IDS),
    ("ViTForImageClassification", "ViTConfig", _IMAGE, {"pixel_values"}),
    ("CLIPModel", "CLIPConfig", {"text_config": _TEXT, "vision_config": _IMAGE}, _IDS | {"pixel_values"}),
    ("WhisperForConditionalGeneration", "WhisperConfig", _MEL, _DECODER | {"input_features"}),
    ("Wav2Vec2ForCTC", "Wav2Vec2Config", _AUDIO, {"0"}),
]


@pytest.mark.parametrize(("name", "config", "options", "expected"), HF, ids=[case[0] for case in HF])
def test_transformers_models(
    transformers: Any, name: str, config: str, options: dict[str, Any], expected: set[str]
) -> None:
    model = getattr(transformers, name)(getattr(transformers, config)(**options)).eval()
    found = example_inputs(make_twin(model).model)
    assert set(found.dims) == expected
    assert len(found.tried) <= 5
    real = materialise(found)
    with torch.no_grad():
        model(*real.args, **real.kwargs)
