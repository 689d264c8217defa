"""The command line: what it prints where, its exit codes, and the plans of the example models."""

from __future__ import annotations

import importlib
import importlib.util
import json
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from sample_plans import decoder_plan, uncut_plan

from autoshard.cli import main
from autoshard.errors import IndivisibleHeads
from autoshard.plans import Plan
from autoshard.report import render_text

EXAMPLES = Path(__file__).parents[2] / "examples"
MLP = str(EXAMPLES / "mlp.py")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Replace the planner: the plan is the sample, what it was asked for is kept."""
    options: dict[str, Any] = {}

    def plan(model: object, **given: Any) -> Plan:
        assert given.pop("progress") is None
        options.update(given, model=model)
        return decoder_plan()

    stub = types.ModuleType("autoshard.api")
    stub.plan = plan  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "autoshard.api", stub)
    monkeypatch.setattr(importlib.import_module("autoshard"), "api", stub, raising=False)
    return options


def test_explain_prints_the_report(asked: dict[str, Any]) -> None:
    result = run("explain", MLP, "--world", "8")
    assert result.exit_code == 0
    assert result.stdout == render_text(decoder_plan())
    assert type(asked["model"]).__name__ == "MLP"


def test_explain_hands_over_every_option(asked: dict[str, Any], tmp_path: Path) -> None:
    degrees = ("--world", "8", "--tp", "2", "--dp-shard", "4", "--dp-replicate", "1")
    work = ("--batch", "3", "--sequence", "77", "--dtype", "float32")
    machine = ("--device", "L40S", "--memory", "24.5", "--devices-per-node", "4", "--interconnect", "100Gb")
    train = ("--global-batch", "12", "--optimizer", "sgd", "--mixed-precision", "bfloat16", "--masters", "float32")
    more = ("--checkpointing", "full", "--logits", "sharded", "--dump-dir", str(tmp_path))
    overrides = ("--override", "layers.*.a=replicate", "--override", "head=replicate")
    sums = ("--tp-reduce-dtype", "float32")
    assert run("explain", MLP, *sums, *degrees, *work, *machine, *train, *more, *overrides).exit_code == 0
    del asked["model"]
    assert asked == {
        "world": 8,
        "tp": 2,
        "dp_shard": 4,
        "dp_replicate": 1,
        "batch": 3,
        "sequence": 77,
        "dtype": "float32",
        "device": "L40S",
        "memory": 24.5,
        "devices_per_node": 4,
        "interconnect": "100Gb",
        "global_batch": 12,
        "optimizer": "sgd",
        "mixed_precision": "bfloat16",
        "masters": "float32",
        "tp_reduce_dtype": "float32",
        "checkpointing": "full",
        "sequence_parallel": None,
        "logits": "sharded",
        "dump_dir": str(tmp_path),
        "overrides": {"layers.*.a": "replicate", "head": "replicate"},
    }


def test_what_is_not_pinned_is_left_to_the_planner(asked: dict[str, Any]) -> None:
    run("explain", MLP, "--world", "8")
    del asked["model"]
    assert asked.pop("world") == 8
    assert asked.pop("overrides") == {}
    assert set(asked.values()) == {None}


def test_json_is_the_plan_and_nothing_else(asked: dict[str, Any]) -> None:
    result = run("explain", MLP, "--world", "8", "--json")
    assert result.exit_code == 0
    assert result.stdout == decoder_plan().to_json()


def test_passes_are_shown_below(asked: dict[str, Any]) -> None:
    assert "512 ops" in run("explain", MLP, "--world", "8", "--passes").stdout


@pytest.mark.parametrize(("gate", "code"), [("0.9", 0), ("0.9999", 1)])
def test_fail_under_is_a_gate(gate: str, code: int, asked: dict[str, Any]) -> None:
    result = run("explain", MLP, "--world", "8", "--json", "--fail-under", gate)
    assert result.exit_code == code
    assert json.loads(result.stdout)
    assert ("error: less than >99.9%" in result.stderr) == bool(code)


@pytest.mark.parametrize(
    "arguments",
    [
        ("explain",),
        ("explain", MLP),
        ("explain", MLP, "--world", "0"),
        ("explain", MLP, "--world", "8", "--dtype", "int3"),
        ("explain", MLP, "--world", "8", "--override", "head"),
        ("explain", MLP, "--world", "8", "--fail-under", "95"),
        ("explain", MLP, "--world", "8", "--json", "--passes"),
        ("explian",),
        ("diff", "one.json"),
    ],
)
def test_wrong_usage_exits_2(arguments: tuple[str, ...], asked: dict[str, Any]) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert "Usage:" in result.stderr
    assert result.stdout == ""


def refuse(*_: object, **__: object) -> Plan:
    raise IndivisibleHeads(
        "cannot split 6 attention heads over 4 tensor-parallel ranks",
        at="layers.0.attention (gpt.py:41)",
        got="tp=4, heads=6; allowed: 1, 2, 3, 6",
        help="pass --tp 2, or leave tp to the planner",
    )


def test_a_refusal_is_four_lines_on_stderr(asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["autoshard.api"], "plan", refuse)
    result = run("explain", MLP, "--world", "4")
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.splitlines() == [
        "error: cannot split 6 attention heads over 4 tensor-parallel ranks",
        "   at: layers.0.attention (gpt.py:41)",
        "  got: tp=4, heads=6; allowed: 1, 2, 3, 6",
        " help: pass --tp 2, or leave tp to the planner",
    ]


def test_a_traceback_only_if_asked_for(asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["autoshard.api"], "plan", refuse)
    result = run("explain", MLP, "--world", "4", "--traceback")
    assert isinstance(result.exception, IndivisibleHeads)
    assert result.exit_code == 1


def test_a_bad_target_is_a_refusal() -> None:
    result = run("explain", "nothing_here.py", "--world", "4")
    assert result.exit_code == 1
    assert result.stderr.startswith("error: there is no file nothing_here.py\n")


def test_show_and_diff_read_files(tmp_path: Path) -> None:
    one, other = tmp_path / "one.json", tmp_path / "other.json"
    decoder_plan().save(one)
    uncut_plan().save(other)
    assert run("show", str(one)).stdout.startswith("Decoder on 8 ranks")
    assert "tp dim 0 -> whole" in run("diff", str(one), str(other)).stdout
    assert run("diff", str(one), str(other)).exit_code == 0
    assert run("diff", str(one), str(other), "--exit-code").exit_code == 1
    same = run("diff", str(one), str(one), "--exit-code")
    assert (same.exit_code, same.stdout) == (0, "the plans do not differ\n")
    assert run("show", str(tmp_path / "missing.json")).exit_code == 1


def test_help_and_show_need_no_torch(tmp_path: Path) -> None:
    decoder_plan().save(tmp_path / "plan.json")
    code = "import sys; sys.modules['torch'] = None; from autoshard.cli import main; main(sys.argv[1:])"
    for arguments in (["--help"], ["explain", "--help"], ["show", str(tmp_path / "plan.json")]):
        done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, ""), arguments


def test_runs_as_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "autoshard", "--help"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("Usage: autoshard ")


# end to end, with the real planner


def explain(target: str, *options: str) -> Plan:
    result = run("explain", str(EXAMPLES / target), "--json", *options)
    assert result.exit_code == 0, result.stderr
    return Plan.from_dict(json.loads(result.stdout))


def cut(plan: Plan) -> dict[str, int | None]:
    """The tp dim of each parameter of the first of repeated blocks, by the last two parts of its name."""
    return {
        ".".join(name.split(".")[-2:]): one.tp_dim
        for name, one in plan.parameters.items()
        if not any(part.isdigit() and part != "0" for part in name.split("."))
    }


def test_mlp_is_cut_by_columns_then_by_rows() -> None:
    plan = explain("mlp.py", "--world", "2", "--tp", "2")
    assert cut(plan) == {"up.weight": 0, "up.bias": 0, "down.weight": 1, "down.bias": None}
    assert plan.parameters["up.weight"].local_shape == (2048, 1024)


def test_own_decoder_is_cut_by_heads_and_inner_features() -> None:
    plan = explain("decoder.py", "--world", "4", "--tp", "2")
    found = cut(plan)
    attention = {"query.weight": 0, "key.weight": 0, "value.weight": 0, "output.weight": 1}
    mlp = {"gate.weight": 0, "up.weight": 0, "down.weight": 1}
    assert {name: found[name] for name in attention | mlp} == attention | mlp
    assert plan.mesh.tp == 2
    assert plan.mesh.world == 4
    assert plan.coverage.parameter_bytes > 0.9


def test_a_published_model_is_covered() -> None:
    plan = explain("llama3_8b.json", "--world", "8", "--tp", "2", "--fail-under", "0.98")
    assert (plan.mesh.tp, plan.mesh.dp_shard) == (2, 4)
    assert str(plan).startswith("LlamaForCausalLM on 8 ranks: dp_replicate=1 dp_shard=4 tp=2\n")
    assert {name: one for name, one in cut(plan).items() if one is not None} == {
        "embed_tokens.weight": 0,
        "q_proj.weight": 0,
        "k_proj.weight": 0,
        "v_proj.weight": 0,
        "o_proj.weight": 1,
        "gate_proj.weight": 0,
        "up_proj.weight": 0,
        "down_proj.weight": 1,
        "lm_head.weight": 0,
    }


@pytest.mark.parametrize("name", ["qwen3_8b", "mistral_7b"])
def test_two_layers_of_other_published_models_are_covered(name: str, tmp_path: Path) -> None:
    config = json.loads((EXAMPLES / "configs" / f"{name}.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 2}))
    plan = explain(str(tmp_path), "--world", "8", "--tp", "4", "--fail-under", "0.98")
    assert (plan.mesh.tp, plan.mesh.dp_shard) == (4, 2)


def test_an_override_keeps_a_module_whole() -> None:
    plan = explain("decoder.py", "--world", "2", "--tp", "2", "--override", "blocks.*.mlp=replicate")
    assert {one.tp_dim for name, one in plan.parameters.items() if ".mlp." in name} == {None}
    assert {one.tp_dim for name, one in plan.parameters.items() if ".query." in name} == {0}


def test_the_planner_refuses_in_the_users_terms() -> None:
    result = run("explain", str(EXAMPLES / "decoder.py"), "--world", "8", "--tp", "3")
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ")
    assert "help: " in result.stderr
    unknown = run("explain", MLP, "--world", "2", "--tp", "2", "--override", "upp=replicate")
    assert unknown.exit_code == 1
    assert "did you mean up" in unknown.stderr
