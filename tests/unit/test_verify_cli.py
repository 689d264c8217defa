"""``autoshard verify``: exit codes, JSON, plans from files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import autoshard
from autoshard.cli import main
from autoshard.plans import Mesh
from autoshard.proving.proof import Proof
from autoshard.targets import load_model

MLP = str(Path(__file__).parents[2] / "examples" / "mlp.py")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["verify", *arguments])


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    autoshard.plan(load_model(MLP), world=8, tp=2).save(path)
    return path


def spoiled(plan_file: Path, tmp_path: Path) -> str:
    data = json.loads(plan_file.read_text())
    data["parameters"]["down.bias"]["read"] = "local"
    path = tmp_path / "spoiled.json"
    path.write_text(json.dumps(data))
    return str(path)


def test_a_new_plan_is_made_and_proved() -> None:
    result = run(MLP, "--tp", "2")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0] == "exact: 1 output and 4 gradients agree on 2 simulated tp ranks"
    assert "  -  an extent of 4096 is 4" in lines
    assert lines[-1].startswith("not proved here: dropout; FSDP")
    assert result.stderr == ""


def test_the_plan_of_a_file_is_proved_at_its_own_tp(plan_file: Path) -> None:
    result = run(MLP, "--plan", str(plan_file), "--json")
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert (data["ok"], data["tp"]) == (True, 2)
    assert max(data["parameters"].values()) < 1e-10


def test_a_wrong_plan_exits_1_and_names_the_culprit(plan_file: Path, tmp_path: Path) -> None:
    path = spoiled(plan_file, tmp_path)
    result = run(MLP, "--plan", path)
    assert result.exit_code == 1
    assert result.stdout.startswith("WRONG: 1 of 1 output")
    assert "down.bias: it is added 2 times" in result.stdout
    as_json = run(MLP, "--plan", path, "--json")
    assert as_json.exit_code == 1
    assert json.loads(as_json.stdout)["culprits"][0]["fqn"] == "down.bias"


def test_degrees_that_contradict_each_other_exit_1_before_the_model_is_read(plan_file: Path) -> None:
    other = run("no_such_file.py", "--plan", str(plan_file), "--tp", "4")
    assert (other.exit_code, other.stdout) == (1, "")
    assert other.stderr.startswith("error: the plan is for 2 tensor-parallel ranks\n  got: --tp 4; allowed: 2")
    odd = run("no_such_file.py", "--tp", "2", "--processes", "3")
    assert odd.exit_code == 1
    assert odd.stderr.startswith("error: 3 processes are no multiple of 2")


def test_the_plan_of_another_model_exits_1(plan_file: Path) -> None:
    result = run(str(Path(MLP).with_name("decoder.py")), "--plan", str(plan_file))
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ")


@pytest.mark.parametrize("arguments", [(), (MLP,), (MLP, "--tp", "0"), (MLP, "--tp", "2", "--processes", "0")])
def test_wrong_usage_exits_2(arguments: tuple[str, ...]) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert "Usage:" in result.stderr


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Replace the run on processes: what it was asked for is kept."""
    asked: dict[str, Any] = {}

    def stub(model: object, plan: object, number: int, **options: Any) -> Proof:
        asked.update(options, number=number)
        return Proof(True, {"w": 0.0}, {"": 0.0}, (), 2, (), 1e-9, 1.0, Mesh(dp_shard=2, tp=2), {"w": 0.0})

    monkeypatch.setattr("autoshard.proving.processes.verify_in_processes", stub)
    return asked


def test_processes_come_after_the_proof_in_one_process(
    processes: dict[str, Any], plan_file: Path, tmp_path: Path
) -> None:
    result = run(MLP, "--plan", str(plan_file), "--processes", "4")
    assert result.exit_code == 0, result.output
    assert "agree on 4 processes (dp_replicate=1 dp_shard=2 tp=2)" in " ".join(result.stdout.split())
    assert (processes["number"], processes["target"]) == (4, MLP)
    processes.clear()
    assert run(MLP, "--plan", spoiled(plan_file, tmp_path), "--processes", "4").exit_code == 1
    assert processes == {}  # what is wrong in one process needs no others
