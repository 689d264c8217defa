"""What TARGET means: files, names and configs, and what is said when it means nothing or too much."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autoshard.errors import TargetError
from autoshard.targets import load_model

EXAMPLES = Path(__file__).parents[2] / "examples"
HEAD = "from __future__ import annotations\nimport torch\nfrom torch import nn\n"
NET = """
class Net(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.up = nn.Linear(width, 8)
"""
WHOLE = """
class Act(nn.Module):
    pass
class Whole(Net):
    def __init__(self):
        super().__init__()
        self.net = Net()
"""
TIED = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 4)
        self.down.weight = self.up.weight
"""


def load(target: str) -> Any:
    """Load a target; its attributes are of any type."""
    return load_model(target)


@pytest.fixture(autouse=True)
def _same_imports() -> Iterator[None]:
    """Undo what loading a target adds to the interpreter."""
    path, modules = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if name.startswith(("autoshard_target_", "mine")):
            del sys.modules[name]


def write(folder: Path, code: str, name: str = "model.py") -> str:
    path = folder / name
    path.write_text(HEAD + code)
    return str(path)


def devices(model: nn.Module) -> set[str]:
    return {one.device.type for one in model.parameters()}


@pytest.mark.parametrize("name", ["decoder.py", "mlp.py", "decoder.py:make_decoder", "mlp.py:MLP"])
def test_examples_build_on_meta(name: str) -> None:
    assert devices(load(str(EXAMPLES / name))) == {"meta"}


def test_the_only_class(tmp_path: Path) -> None:
    assert type(load(write(tmp_path, NET))).__name__ == "Net"


def test_a_factory_beats_the_class_it_builds(tmp_path: Path) -> None:
    model = load(write(tmp_path, NET + "def make() -> Net:\n    return Net(16)\n"))
    assert model.up.in_features == 16
    assert devices(model) == {"meta"}


def test_an_instance_beats_both(tmp_path: Path) -> None:
    code = NET + "def make() -> Net:\n    return Net(16)\nactivation = nn.ReLU()\nmodel = Net(2)\nalias = model\n"
    assert load(write(tmp_path, code)).up.in_features == 2


def test_parts_of_another_model_are_no_candidates(tmp_path: Path) -> None:
    instances = "part = nn.Sequential(nn.Linear(2, 2))\nwhole = nn.Sequential(part, nn.Linear(2, 3))\n"
    assert len(load(write(tmp_path, instances))) == 2
    assert type(load(write(tmp_path, NET + WHOLE))).__name__ == "Whole"


def test_a_factory_in_all_needs_no_annotation(tmp_path: Path) -> None:
    code = "__all__ = ['build']\ndef build():\n    return nn.Linear(3, 4)\ndef other():\n    return 1\n"
    assert load(write(tmp_path, code)).in_features == 3


def test_an_annotation_only_a_type_checker_sees(tmp_path: Path) -> None:
    code = NET + "def helper() -> Unknown:\n    return 1\n"
    assert type(load(write(tmp_path, code))).__name__ == "Net"


def test_a_constructor_that_reads_values_is_run_as_it_is(tmp_path: Path) -> None:
    code = NET + "def make() -> Net:\n    return Net(int(torch.ones(3).sum().item()))\n"
    model = load(write(tmp_path, code))
    assert model.up.in_features == 3
    assert devices(model) == {"cpu"}


def test_ties_survive(tmp_path: Path) -> None:
    model = load(write(tmp_path, TIED))
    assert model.up.weight is model.down.weight


def test_a_file_may_import_its_neighbours(tmp_path: Path) -> None:
    write(tmp_path, NET, "mine_parts.py")
    assert type(load(write(tmp_path, "from mine_parts import Net\nmodel = Net()\n"))).__name__ == "Net"


def test_a_file_named_like_a_package_takes_no_ones_place(tmp_path: Path) -> None:
    load(write(tmp_path, NET, "torch.py"))
    assert sys.modules["torch"] is torch


def test_package_and_name_from_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine").mkdir()
    write(tmp_path / "mine", NET + "model = Net(5)\n", "net.py")
    monkeypatch.chdir(tmp_path)
    assert load("mine.net:Net").up.in_features == 4
    assert load("mine.net:model").up.in_features == 5


@pytest.mark.parametrize(
    ("code", "name", "words"),
    [
        ("x = 1\n", "", ["there is no model", "make_model"]),
        (
            "class Net(nn.Module):\n    def __init__(self, config):\n        pass\n",
            "",
            ["no model", "Net needs config"],
        ),
        ("a = nn.Linear(1, 1)\nb = nn.Linear(1, 1)\n", "", ["2 models", "a, b", ":a"]),
        ("def one() -> nn.Module: ...\ndef two() -> nn.Linear: ...\n", "", ["2 models", "one, two"]),
        ("class Model(nn.Module): ...\n", ":Modle", ["no 'Modle'", "did you mean Model"]),
        ("def make(width, depth=2): ...\n", ":make", ["make needs arguments", "width"]),
        ("def make(): return {}\n", ":make", ["make returned a dict, not a torch.nn.Module"]),
        ("size = 3\n", ":size", ["size is a int"]),
        ("raise ValueError('odd')\n", "", ["raised ValueError: odd", "model.py:4"]),
        ("def (:\n", "", ["raised SyntaxError", "model.py:4"]),
        ("import nothing_of_this_name\n", "", ["raised ModuleNotFoundError", "model.py:4"]),
        ("def make() -> nn.Module:\n    raise KeyError('size')\n", "", ["make raised KeyError", "model.py:5"]),
    ],
)
def test_refusals_say_what_and_where(code: str, name: str, words: list[str], tmp_path: Path) -> None:
    with pytest.raises(TargetError) as error:
        load(write(tmp_path, code) + name)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize("target", ["", "foo", ":", "a:", ":b", "model.json", "nothing_of_this_name:x", "nope.py:x"])
def test_refuses_what_is_no_target(target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TargetError):
        load(target)


def test_a_missing_file_lists_near_ones(tmp_path: Path) -> None:
    write(tmp_path, NET)
    with pytest.raises(TargetError, match=r"did you mean model\.py"):
        load(str(tmp_path / "modle.py"))


CONFIGS = {"llama3_8b.json": 8.03, "configs/qwen3_8b.json": 8.19, "configs/mistral_7b.json": 7.24}


@pytest.mark.parametrize("name", CONFIGS)
def test_published_configs_have_their_published_size(name: str) -> None:
    model = load(str(EXAMPLES / name))
    assert devices(model) == {"meta"}
    assert {one.dtype for one in model.parameters()} == {torch.bfloat16}
    assert sum(one.numel() for one in model.parameters()) / 1e9 == pytest.approx(CONFIGS[name], abs=0.005)
    assert torch.get_default_dtype() == torch.float32


def small_config(folder: Path, **changes: object) -> Path:
    config = json.loads((EXAMPLES / "llama3_8b.json").read_text())
    config |= {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "vocab_size": 32, **changes}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_folder_with_a_config_and_ties(tmp_path: Path) -> None:
    model = load(str(small_config(tmp_path, tie_word_embeddings=True)))
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_the_named_architecture_is_built(tmp_path: Path) -> None:
    sequence = load(str(small_config(tmp_path, architectures=["LlamaForSequenceClassification"])))
    assert type(sequence).__name__ == "LlamaForSequenceClassification"
    causal = load(str(small_config(tmp_path, architectures=None)))
    assert type(causal).__name__ == "LlamaForCausalLM"


def test_an_unknown_config_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "nothing_of_this_name"}')
    with pytest.raises(TargetError):
        load(str(tmp_path))


def test_a_config_without_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(TargetError, match=r"pip install autoshard\[hf\]"):
        load(str(small_config(tmp_path)))
