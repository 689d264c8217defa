"""The published configurations: models of the published size, what is given to the planner, how a choice is judged."""

from __future__ import annotations

import importlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autoshard.plans import Mesh, MeshChoice


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return importlib.import_module("published")


@pytest.fixture
def row(benchmark: Any) -> Any:
    return {row.row: row for row in benchmark.rows()}.__getitem__


def choice(tp: int, speed: float = 1.0, fits: bool = True, shard: int = 8) -> MeshChoice:
    return MeshChoice(Mesh(1, shard, tp), 1, "", fits, tokens_per_second=speed)


def test_rows_are_whole(benchmark: Any) -> None:
    rows = benchmark.rows()
    assert len({row.row for row in rows}) == len(rows) == 35
    assert {row.model for row in rows} == set(benchmark.MODELS)
    for row in rows:
        assert row.source
        assert row.checkpointing in ("", "none", "selective", "full")
        assert row.precision in ("bf16", "fp8")
        degrees = row.tp * row.pp * row.cp * max(row.dp_shard, 1)
        assert row.world % degrees == 0, row
        assert row.tp * row.pp * row.cp * row.dp_shard == row.world or row.dp_shard <= 1, row


def test_models_are_of_the_published_size(benchmark: Any) -> None:
    for name, model in benchmark.MODELS.items():
        found = sum(p.numel() for p in model.on_meta().parameters()) / 1e9
        printed = f"{model.billions:g}"
        half_a_digit = 0.5 * 10.0 ** -len(printed.partition(".")[2])
        assert abs(found - model.billions) <= max(0.02 * model.billions, half_a_digit), (name, found)


def test_low_rank_layers_are_all_that_trains(benchmark: Any) -> None:
    model = benchmark.MODELS["Llama-3-70B-LoRA"].on_meta()
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert {name.rpartition(".")[0].rpartition(".")[2] for name in trained} == {"down", "up"}
    assert len(trained) == 80 * 7 * 2


def test_fused_attention_with_sinks_is_the_eager_one(benchmark: Any) -> None:
    kernels = importlib.import_module("published_kernels")
    eager = importlib.import_module("transformers.models.gpt_oss.modeling_gpt_oss").eager_attention_forward
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, heads, 5, 8) for heads in (4, 2, 2))
    module = nn.Module()
    module.num_key_value_groups, module.sinks = 2, nn.Parameter(torch.randn(4))  # type: ignore[assignment]
    mask = torch.full((5, 5), -torch.inf).triu(1)
    whole, _ = eager(module, query, key, value, mask, scaling=0.3)
    fused, _ = kernels.with_sinks(module, query, key, value, None, scaling=0.3, s_aux=module.sinks)
    torch.testing.assert_close(fused, whole, atol=1e-5, rtol=1e-5)
    spoiled, _ = kernels.with_sinks(module, query, key, value, None, scaling=0.3, s_aux=module.sinks + 1)
    assert not torch.allclose(spoiled, whole, atol=1e-2)


def test_routed_experts_are_those_that_each_token_chose(benchmark: Any) -> None:
    kernels = importlib.import_module("published_kernels")
    torch.manual_seed(0)
    routed = kernels.Routed(8, 16, 4, 2, nn.Linear(8, 8))
    for parameter in routed.parameters():
        nn.init.normal_(parameter)
    x = torch.randn(2, 6, 8)
    found, logits = routed(x)
    scores, chosen = logits.sigmoid().topk(2)
    gate, up = torch.einsum("bth,ehw->btew", x, routed.experts.into).chunk(2, dim=-1)
    every = torch.einsum("btew,ewh->bteh", nn.functional.silu(gate) * up, routed.experts.out)
    picked = every.gather(2, chosen.unsqueeze(-1).expand(-1, -1, -1, 8)) * scores.unsqueeze(-1)
    torch.testing.assert_close(found, picked.sum(2) + routed.shared(x), atol=1e-3, rtol=1e-4)
    # the first two of all, whatever was chosen, are others
    assert not torch.allclose(found, every[:, :, :2].sum(2) + routed.shared(x), atol=1e-1)


def test_settings_hold_what_is_stated_and_nothing_of_the_answer(benchmark: Any, row: Any) -> None:
    stated = benchmark.settings(row(3))
    assert (stated["world"], stated["batch"], stated["sequence"]) == (256, 16, 8192)
    assert (stated["checkpointing"], stated["masters"]) == ("full", "float32")
    assert (stated["device"].device.name, stated["dp_shard"]) == ("H100-96", None)
    assert "tp" not in stated
    # no sharded data parallelism existed there; with ZeRO-1 there was some
    assert benchmark.settings(row(303))["dp_shard"] == 1
    assert benchmark.settings(row(20))["dp_shard"] is None
    assert benchmark.settings(row(20))["checkpointing"] == "none"  # its source recomputes no layer
    assert benchmark.settings(row(23))["checkpointing"] is None
    assert benchmark.settings(row(13))["logits"] == "whole"  # it has none
    fp8, bf16 = (benchmark.settings(row(number))["device"].device for number in (14, 25))
    assert fp8.flops["bfloat16"] == bf16.flops["float8"] > bf16.flops["bfloat16"]
    assert benchmark.settings(row(13))["example_inputs"][0].shape[1] == benchmark.settings(row(13))["sequence"]


@pytest.mark.parametrize(
    ("number", "chosen", "said"),
    [
        (1, choice(1), "equal"),
        (1, choice(2), "within one power of two"),
        (1, choice(4), "off"),
        (1, choice(1, fits=False), "off: nothing fits"),
        (3, choice(8), "equal"),
        (3, choice(4), "within one power of two"),
        (3, choice(16), "within one power of two"),
        (3, choice(2), "off"),
        (33, choice(8, fits=False), "wants another axis"),
        (33, choice(16), "wants another axis"),
        (3, choice(64), "off"),
        (33, choice(4), "equal"),
        (33, choice(1), "off"),
    ],
)
def test_verdicts(benchmark: Any, row: Any, number: int, chosen: MeshChoice, said: str) -> None:
    assert benchmark.verdict(row(number), chosen, None) == said


def test_the_row_that_must_rank_below(benchmark: Any, row: Any) -> None:
    assert benchmark.verdict(row(4), choice(1, 2.0), choice(8, 1.0)) == "ranks below"
    assert benchmark.verdict(row(4), choice(1, 2.0), choice(8, 3.0)) == "off: ranks above"
    assert benchmark.verdict(row(4), choice(1, 2.0), choice(8, 2.0)) == "off: ranks above"
    assert benchmark.verdict(row(4), choice(1, 2.0), None) == "off: ranks above"


def test_the_published_mesh_is_found(benchmark: Any, row: Any) -> None:
    choices = [choice(1, 5.0), choice(8, 1.0, shard=8), choice(8, 2.0, shard=2), choice(8, 9.0, fits=False, shard=1)]
    assert benchmark.as_published(row(4), choices) is choices[1]
    # another axis: the best that fits with that tp
    assert benchmark.as_published(row(35), choices) is choices[2]
    assert benchmark.as_published(row(303), choices) is choices[3]
    assert benchmark.as_published(row(3), choices[:1]) is None
    assert benchmark.as_published(row(4), [replace(choices[1], total_bytes=0)]) is None


def test_a_row_is_planned(benchmark: Any, row: Any) -> None:
    found = benchmark.measure(row(30))
    assert len(found) == len(benchmark._HEADER)
    assert found[0] == 30
    assert found[-1] == "equal"
    assert "1 equal" in benchmark.summary([found])
    # a refusal is told, and does not stop the page
    refused = benchmark.measure(replace(row(30), world=0))
    assert len(refused) == len(found)
    assert str(refused[-1]).startswith("refused: ")


def test_stored_rows_are_of_this_code(benchmark: Any, tmp_path: Path) -> None:
    path, code = tmp_path / "meshes.jsonl", benchmark.version()
    assert benchmark.known(path, None) == {}
    lines = ({"row": 1, "version": code, "cells": [1]}, {"row": 2, "version": "old", "cells": [2]})
    path.write_text("\n".join(map(json.dumps, lines)))
    assert benchmark.known(path, code) == {1: [1]}
    assert benchmark.known(path, None) == {1: [1], 2: [2]}
