"""What users do with a model besides training it: the same at tp=2 as in one process."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import users_workers as jobs
from spawn import Pool

Gloo = Callable[[int], Pool]
TOLERANCE = 1e-9


def worst(errors: dict[str, float]) -> dict[str, float]:
    return {name: error for name, error in errors.items() if not error < TOLERANCE}


@pytest.mark.parametrize("sample", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", ["Llama", "GPT2"])
def test_generation_with_a_cache(gloo: Gloo, kind: str, sample: bool) -> None:
    for answer in gloo(2).run(jobs.generated, kind, sample):
        assert answer == {"equal": True, "everywhere": True, "lengths": [4, 1, 1, 1, 1, 1]}


@pytest.mark.parametrize("kind", ["Llama", "GPT2"])
def test_attention_weights_and_hidden_states_on_request(gloo: Gloo, kind: str) -> None:
    for errors in gloo(2).run(jobs.details, kind):
        assert worst(errors) == {}


def test_without_the_plan_s_word_a_rank_gives_its_own_heads(gloo: Gloo) -> None:
    assert gloo(2).run(jobs.shares_of_weights) == [(2, 4), (2, 4)]


@pytest.mark.parametrize(("norm", "overrides"), [(True, {}), (False, {"table": "replicate", "down": "replicate"})])
def test_a_method_other_than_forward(gloo: Gloo, norm: bool, overrides: dict[str, str]) -> None:
    for errors in gloo(2).run(jobs.method, norm, overrides):
        assert worst(errors) == {}


def test_a_method_gives_a_share_where_the_stream_between_layers_is_cut(gloo: Gloo) -> None:
    """As the docs say: without a norm over it, and without overrides."""
    for errors in gloo(2).run(jobs.method, False, {}):
        assert worst(errors) == {"answer": float("inf")}


def test_two_forwards_and_one_backward(gloo: Gloo) -> None:
    for errors in gloo(2).run(jobs.twice):
        assert worst(errors) == {}


@pytest.mark.parametrize("kind", ["Llama", "GPT2"])
def test_evaluation_before_training(gloo: Gloo, kind: str) -> None:
    for errors in gloo(2).run(jobs.evaluated_first, kind):
        assert worst(errors) == {}


def test_hooks(gloo: Gloo) -> None:
    for errors, warned in gloo(2).run(jobs.hooked):
        assert worst(errors) == {}
        assert len(warned) == 1
        assert "of model.layers.0.mlp see this rank's part" in warned[0]


def test_autocast(gloo: Gloo) -> None:
    for errors in gloo(2).run(jobs.autocast):
        assert errors["logits"] < 4 * 2**-8
        # a gradient that is nearly cancelled has fewer digits; one that is summed wrongly is off by half or more
        assert max(errors.values()) < 0.3
