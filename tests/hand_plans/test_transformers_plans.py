"""transformers' own plans under proof: a few of those that ``benchmarks/hand_plans.py`` sweeps over."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rows import few
from zoo.tiny import tiny

import autoshard

VERDICTS = json.loads((Path(__file__).parents[1] / "zoo" / "hand_verdicts.json").read_text())

#: A right plan of each kind: experts, latent attention, an identity expert, a bare parameter, a fused projection.
RIGHT = ["qwen3_moe", "deepseek_v2", "phi3", "gpt_neox"]
#: What makes a plan wrong.
WRONG = {
    "apertus": ("gradient sum", "model.layers.0.mlp.act_fn.alpha_p"),
    "sarvam_moe": ("gradient sum", "model.layers.0.self_attn.q_norm.weight"),
    "esmc": ("size", "esmc.layers.0.self_attn.q_norm.weight"),
    "doge": ("size", "model.layers.0.self_attn.A"),
    "inkling2_text": ("part", "model.layers.0.mlp.experts.gate_up_proj"),
    "muse_glimmer_text": ("nonlinear", "embed_tokens"),
    "t5gemma2_text": ("nonlinear", "embed_tokens"),
    "qwen3_omni_moe_talker_code_predictor": ("rule", "lm_head"),
}


@pytest.mark.parametrize("model_type", RIGHT)
def test_right_plans_pass(model_type: str) -> None:
    assert VERDICTS[model_type]["verdict"] == "right"
    model, inputs = tiny(model_type)
    proof = autoshard.verify(model, model.tp_plan, example_inputs=inputs)
    assert proof.ok, str(proof)


@pytest.mark.parametrize(
    "model_type",
    few(WRONG, ["apertus", "esmc", "inkling2_text", "t5gemma2_text", "qwen3_omni_moe_talker_code_predictor"]),
)
def test_wrong_plans_are_named(model_type: str) -> None:
    assert VERDICTS[model_type]["verdict"] != "right"
    model, inputs = tiny(model_type)
    proof = autoshard.verify(model, model.tp_plan, example_inputs=inputs)
    assert not proof.ok
    assert (proof.culprits[0].kind, proof.culprits[0].fqn) == WRONG[model_type]
