"""Models of torch's own attention are cut by head, the plan says what is replaced, and the whole is exact."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from models import build
from replace_models import HEADS, WIDTH, Attending
from torch import Tensor, nn

import autoshard
from autoshard.errors import PlanMismatch
from autoshard.plans import Plan, Replacement
from autoshard.proving.specimen import make_specimen
from autoshard.replace.attention import Attention
from autoshard.twin import make_twin

BATCH, LENGTH = 2, 5
IDS = torch.zeros(2, 7, dtype=torch.long)


def hidden(*shape: int) -> Tensor:
    """A mask under which every query sees the first key."""
    mask = torch.rand(*shape, generator=torch.Generator().manual_seed(0)) < 0.4
    mask[..., 0] = False
    return mask


def inputs(key: int = WIDTH, value: int = WIDTH, mask: Tensor | None = None, padding: bool = False) -> tuple[Any, ...]:
    shapes = [(BATCH, LENGTH, width) for width in (WIDTH, key, value)]
    return (*(torch.randn(*shape) for shape in shapes), mask, hidden(BATCH, LENGTH) if padding else None)


CASES: dict[str, tuple[dict[str, Any], tuple[Any, ...]]] = {
    "itself": ({}, inputs()),
    "another": ({"cross": True}, inputs()),
    "other widths": ({"cross": True, "kdim": 24, "vdim": 40}, inputs(24, 40)),
    "masks": ({}, inputs(mask=hidden(LENGTH, LENGTH), padding=True)),
    "float mask, weights": ({"weights": True}, inputs(mask=torch.randn(LENGTH, LENGTH))),
    "more keys": ({"add_bias_kv": True, "add_zero_attn": True}, inputs(mask=hidden(LENGTH, LENGTH), padding=True)),
    "no bias": ({"bias": False}, inputs()),
}


def made(name: str) -> tuple[Attending, Plan, tuple[Any, ...]]:
    torch.manual_seed(0)
    options, given = CASES[name]
    model = Attending(batch_first=True, **options)
    return model, autoshard.plan(model, world=2, tp=2, example_inputs=given), given


@pytest.mark.parametrize("name", CASES)
def test_every_kind_of_attention_is_cut_and_exact(name: str) -> None:
    model, plan, given = made(name)
    assert type(model.attention) is nn.MultiheadAttention  # planning changes nothing
    weights = {fqn: t.tp_dim for fqn, t in plan.parameters.items() if fqn.startswith("attention") and "bias" not in fqn}
    assert weights.pop("attention.out_proj.weight") == 1
    assert set(weights.values()) == {0}
    assert [(one.fqn, one.kind) for one in plan.replacements] == [("attention", "attention")]
    assert plan.modules["attention.out_proj"].outputs == {"": "P->R"}
    assert autoshard.verify(model, plan, example_inputs=given).ok
    assert type(model.attention) is nn.MultiheadAttention


def test_without_the_replacement_the_cut_does_not_run() -> None:
    model, plan, given = made("itself")
    assert not autoshard.verify(model, dataclasses.replace(plan, replacements=()), example_inputs=given).ok


def test_a_plan_that_replaces_something_else_is_refused() -> None:
    model, plan, given = made("itself")
    wrong = dataclasses.replace(plan, replacements=(Replacement("up", "attention", ""),))
    with pytest.raises(PlanMismatch, match="torch's own attention"):
        autoshard.verify(model, wrong, example_inputs=given)


def test_weights_of_each_head_keep_the_heads_together() -> None:
    model, given = Attending(batch_first=True, weights=True, average=False), inputs()
    plan = autoshard.plan(model, world=2, tp=2, example_inputs=given)
    assert plan.parameters["attention.in_proj_weight"].tp_dim is None
    assert plan.parameters["up.weight"].tp_dim == 0
    assert autoshard.verify(model, plan, example_inputs=given).ok


@pytest.mark.parametrize("case", ["one head", "another, one head", "a mask of each head", "other widths, one head"])
def test_where_heads_cannot_be_cut_values_are_cut_inside_each(case: str) -> None:
    widths = (24, 40) if "widths" in case else (WIDTH, WIDTH)
    options: dict[str, Any] = {"kdim": 24, "vdim": 40} if "widths" in case else {}
    mask = hidden(BATCH * HEADS, LENGTH, LENGTH) if "mask" in case else None
    model = Attending(HEADS if mask is not None else 1, cross="other" in case, batch_first=True, **options)
    given = inputs(*widths, mask=mask)
    plan = autoshard.plan(model, world=2, tp=2, example_inputs=given)
    assert plan.parameters["attention.out_proj.weight"].tp_dim == 1
    if "widths" in case:
        cut = {name: plan.parameters[f"attention.{name}_proj_weight"].tp_dim for name in "qkv"}
        assert cut == {"q": None, "k": None, "v": 0}
    else:
        assert plan.parameters["attention.in_proj_weight"].read == "slice"
    assert autoshard.verify(model, plan, example_inputs=given).ok


@pytest.mark.parametrize("name", ["torch encoder", "torch transformer"])
def test_stacks_are_cut_and_exact(name: str) -> None:
    model = build(name)
    plan = autoshard.plan(model, world=2, tp=2, example_inputs=(IDS,))
    whole = [fqn for fqn, t in plan.parameters.items() if t.tp_dim is None and len(t.shape) > 1]
    assert whole == []
    kinds = {one.kind for one in plan.replacements}
    assert kinds == {"attention", "layer", "encoder"} | ({"decoder"} if "former" in name else set())
    assert autoshard.verify(model, plan, example_inputs=(IDS,)).ok


def test_repeated_layers_are_folded() -> None:
    plan = autoshard.plan(build("torch encoder"), world=2, tp=2, example_inputs=(IDS,))
    assert [one.fqn for one in plan.replacements] == [
        "encoder",
        "encoder.layers.{0-1}",
        "encoder.layers.{0-1}.self_attn",
    ]


def test_a_plan_without_tensor_parallelism_replaces_nothing() -> None:
    plan = autoshard.plan(build("torch encoder"), world=2, tp=1, example_inputs=(IDS,))
    assert plan.replacements == ()


def test_only_what_has_something_to_do_is_replaced() -> None:
    model, plan, given = made("itself")
    kept = autoshard.plan(model, world=2, tp=2, example_inputs=given, overrides={"attention": "replicate"})
    assert kept.parameters["up.weight"].tp_dim == 0
    assert (len(plan.replacements), kept.replacements) == (1, ())


def test_the_twin_has_the_replacement_and_the_model_does_not() -> None:
    model = Attending()
    assert type(make_twin(model).model.attention) is Attention
    assert type(model.attention) is nn.MultiheadAttention


def test_a_smaller_specimen_runs_the_replacement_and_says_so() -> None:
    model = Attending()
    small = make_specimen(model, 2, lambda: pytest.fail("it is small")).model
    assert type(small.attention) is nn.MultiheadAttention
    with torch.device("meta"):
        layer = nn.TransformerEncoderLayer(256, 8, 1024, batch_first=True)
        big = nn.TransformerEncoder(layer, 4)
    given = (torch.randn(2, 5, 256),)
    plan = autoshard.plan(big, world=2, tp=2, example_inputs=given)
    proof = autoshard.verify(big, plan, example_inputs=given)
    assert proof.ok
    assert "modules of torch run their replacement" in str(proof)
    assert type(big.layers[0].self_attn) is nn.MultiheadAttention
