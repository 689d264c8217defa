"""Facts about numbered siblings are folded, together with a sibling's own number in their text."""

from __future__ import annotations

from autoshard.folding import fold_refusals, fold_strings, split_number
from autoshard.patterns import unfold
from autoshard.plans import Refusal


def test_equal_texts_fold_over_the_first_number() -> None:
    texts = {f"layers.{i}.up": "cut" for i in (0, 1, 2, 5)} | {"layers.3.up": "whole", "head": "cut"}
    assert fold_strings(texts) == {"layers.{0-2,5}.up": "cut", "layers.3.up": "whole", "head": "cut"}


def test_a_text_may_name_its_own_sibling() -> None:
    texts = {f"layers.{i}.q": f"enters layers.{i}.attention:x" for i in range(3)}
    assert fold_strings(texts) == {"layers.{0-2}.q": "enters layers.{0-2}.attention:x"}
    assert fold_strings({"layers.0.q": "like layers.1.q", "layers.1.q": "like layers.0.q"}) == {
        "layers.0.q": "like layers.1.q",
        "layers.1.q": "like layers.0.q",
    }


def test_refusals_that_name_their_sibling_fold() -> None:
    found = fold_refusals([Refusal(f"a.{i}.w", "m.py:1", f"the buffer a.{i}.b has it") for i in range(4)])
    assert found == (Refusal("a.{0-3}.w", "m.py:1", "the buffer a.{0-3}.b has it"),)


def test_splitting_and_unfolding() -> None:
    assert split_number("layers.12.up") == ("layers.", 12, ".up")
    assert split_number("layer2.up") == ("layer2.up", None, "")
    assert unfold("a.{0-1,4}.b") == ["a.0.b", "a.1.b", "a.4.b"]
