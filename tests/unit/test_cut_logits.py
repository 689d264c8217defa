"""Logits that stay cut: which gathers are not made, what is refused with its line, what it costs, what proves it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from logits_models import Capped, Chosen, Headless, Sliced, Smoothed, Twice, Two, Within, make
from models import Decoder
from torch import nn

from autoshard import cost, verify
from autoshard.api import plan as make_plan
from autoshard.errors import InvalidArgument
from autoshard.exploring import formulas
from autoshard.plans import ModulePlan, Plan

IDS = torch.zeros(2, 8, dtype=torch.long)


def planned(model: nn.Module, **options: Any) -> Plan:
    return make_plan(model, **{"world": 2, "tp": 2, "logits": "sharded", **options})


def refused(model: nn.Module, **options: Any) -> InvalidArgument:
    with pytest.raises(InvalidArgument) as caught:
        planned(model, **options)
    return caught.value


# --- it fires ---


def test_the_gather_of_the_head_is_not_made() -> None:
    plan, whole = planned(Decoder()), planned(Decoder(), logits="whole")
    assert dict(plan.modules["head"].outputs) == {"": "S(-1)->D"}
    assert plan.modules["head"].style == "colwise"
    assert plan.modules["head"].why == "its output stays cut: the loss works on each rank's part of it"
    assert plan.cuts_logits and not whole.cuts_logits
    assert {c.op for c in whole.collectives} - {c.op for c in plan.collectives} == {"all_gather"}
    assert replace(plan.modules["head"], outputs={}, style="", why="") == replace(
        whole.modules["head"], outputs={}, style="", why=""
    )


def test_ops_on_each_element_alone_are_passed() -> None:
    plan = planned(Capped())
    assert dict(plan.modules["head"].outputs) == {"": "S(-1)->D"}
    assert verify(Capped(), plan).ok


def test_a_gather_in_the_code_is_not_made_either() -> None:
    model = Within()
    plan = planned(model)
    (rewrite,) = plan.modules[""].rewrites
    assert rewrite.after.startswith("convert('S(-1)->D', F.linear(")
    assert plan.cuts_logits
    assert verify(model, plan).ok


def test_every_result_that_can() -> None:
    plan = planned(Two())
    assert [dict(plan.modules[name].outputs) for name in ("head", "side")] == [{"": "S(-1)->D"}] * 2
    said = [text for text in plan.assumptions if "DTensor" in text]
    assert [text.partition(" is ")[0] for text in said] == ["logits", "side"]


def test_the_report_says_so() -> None:
    text = str(planned(Decoder()))
    assert "S(-1)->D" in text and "D a DTensor that says how it is cut" in " ".join(text.split())
    assert "DTensor" not in str(planned(Decoder(), logits="whole"))


def test_a_plan_survives_its_file() -> None:
    plan = planned(Within())
    assert Plan.from_dict(plan.to_dict()) == replace(plan, times=())


# --- it leaves the rest alone ---


def test_a_plan_that_asks_for_whole_logits_is_as_ever() -> None:
    assert planned(Decoder(), logits="whole").to_json() == planned(Decoder(), logits=None).to_json()


def test_over_one_rank_they_are_whole_and_the_plan_says_so() -> None:
    plan = planned(Decoder(), tp=1)
    assert not plan.cuts_logits
    assert plan.warnings == ("logits are whole: with tp=1 there is nothing to cut them over",)


# --- it refuses with a reason ---


def test_a_vocabulary_that_does_not_divide() -> None:
    error = refused(Decoder(vocab=25))
    assert error.what == "cannot keep 25 logits cut over 2 tensor-parallel ranks"
    assert error.at is not None and error.at.startswith("head (models.py:")
    assert error.got == "tp=2, 25 logits; allowed: 1, 5, 25"


@pytest.mark.parametrize(("model", "op"), [(Sliced, "aten.slice"), (Chosen, "aten.argmax"), (Twice, "aten.argmax")])
def test_code_that_reads_the_whole_logits(model: type[nn.Module], op: str) -> None:
    error = refused(model())
    assert error.what == "the model works on its whole logits, so that they cannot stay cut"
    assert error.at is not None and error.at.startswith("the model (logits_models.py:")
    assert error.got is not None and error.got.startswith(f"{op}; allowed: ")


def test_a_loss_inside_the_model_that_needs_them_whole() -> None:
    error = refused(Smoothed(), example_inputs=(IDS, IDS))
    assert error.what == "the model works on its whole logits, so that they cannot stay cut"
    assert error.at is not None and "logits_models.py:" in error.at
    assert error.help is not None and "without labels" in error.help


@pytest.mark.parametrize(
    ("model", "options", "said"),
    [(Headless(), {}, "aten.mul"), (Decoder(), {"overrides": {"head": "replicate"}}, "aten.linear")],
)
def test_a_model_without_cut_logits(model: nn.Module, options: dict[str, Any], said: str) -> None:
    error = refused(model, **options)
    assert error.what == "the model returns no logits that are cut over their last dim"
    assert error.got is not None and error.got.startswith(said)


def test_an_unknown_word() -> None:
    with pytest.raises(InvalidArgument, match="no logits is called 'cut'"):
        planned(Decoder(), logits="cut")


# --- it costs ---


def test_each_rank_holds_its_part_of_the_loss() -> None:
    options: dict[str, Any] = {"batch": 3, "sequence": 16, "example_inputs": (IDS,), "world": 4, "tp": 4}
    model = Decoder(vocab=4096)
    cut, whole = planned(model, **options), planned(model, **options | {"logits": "whole"})
    elements = 3 * 16 * 4096
    assert whole.memory_bytes["loss"] == cost.LOSS_BYTES * elements
    assert cut.memory_bytes["loss"] == cost.CUT_LOSS_BYTES * elements // 4
    assert whole.peak_when == "at the loss"
    assert whole.peak_bytes - cut.peak_bytes > elements


def test_the_formula_says_so_too() -> None:
    options: dict[str, Any] = {"tp": 2, "batch": 3, "sequence": 16, "example_inputs": (IDS,)}
    written = formulas(Decoder(), 2, logits="sharded", **options)
    plan = planned(Decoder(), **options)
    numbers = {"B": 3, "T": 16, "t": 2, "s": 1, "r": 1}
    assert written.value(written.memory["loss"], **numbers) == plan.memory_bytes["loss"]


def test_what_a_cap_keeps_is_a_rank_s_part() -> None:
    options: dict[str, Any] = {"batch": 3, "sequence": 16, "example_inputs": (IDS,)}
    kept = [
        planned(model, logits=logits, **options).memory_bytes["activations"]
        for logits in ("whole", "sharded")
        for model in (Decoder(), Capped())
    ]
    assert kept[1] - kept[0] == 2 * (kept[3] - kept[2]) > 0


# --- it is proved ---


@pytest.mark.parametrize("name", ["decoder", "tied", "two", "llama", "gemma2"])
def test_verify_proves_both_modes(name: str) -> None:
    model = make(name)
    given: Any = {"input_ids": IDS} if hasattr(model, "config") else (IDS,)
    proof = verify(model, planned(model, example_inputs=given), example_inputs=given)
    assert proof.ok, str(proof)
    assert any(path.endswith("without gradients") for path in proof.outputs)


@pytest.mark.parametrize(
    "spoiled",
    [{"outputs": {}}, {"outputs": {"": "S(-2)->D"}}, {"inputs": {}}, {"inputs": {}, "outputs": {"": "S(-1)->R"}}],
    ids=str,
)
def test_a_spoiled_plan_is_not_proved(spoiled: dict[str, Any]) -> None:
    model = make("decoder")
    plan = planned(model)
    head: ModulePlan = replace(plan.modules["head"], **spoiled)
    assert not verify(model, replace(plan, modules={**plan.modules, "head": head})).ok
