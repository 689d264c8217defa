"""What the benchmarks of step time and GPU memory say of what they find; nothing is measured here."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

from autoshard.cluster import Cluster
from autoshard.plans import Mesh


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))


@pytest.fixture
def timed(folder: None) -> Any:
    return importlib.import_module("step_time_cpu")


@pytest.fixture
def gpu(folder: None) -> Any:
    return importlib.import_module("gpu_memory")


def test_every_mesh_of_four(timed: Any) -> None:
    assert set(timed.meshes(4)) == {
        Mesh(4, 1, 1), Mesh(2, 2, 1), Mesh(1, 4, 1), Mesh(2, 1, 2), Mesh(1, 2, 2), Mesh(1, 1, 4),
    }  # fmt: skip


def test_order_is_counted_over_pairs_that_differ(timed: Any) -> None:
    def steps(*times: tuple[float, float]) -> list[Any]:
        return [timed.Step("m", Mesh(1, 1, 2**i), predicted, measured) for i, (predicted, measured) in enumerate(times)]

    assert timed.agreement(steps((1, 10), (2, 20), (3, 30))) == (3, 3)
    assert timed.agreement(steps((3, 10), (2, 20), (1, 30))) == (0, 3)
    # 10 and 10.5 are not told apart
    assert timed.agreement(steps((2, 10), (1, 10.5), (3, 30))) == (2, 2)
    other = [timed.Step("other", Mesh(), 5.0, 1.0)]
    assert timed.agreement(steps((1, 10), (2, 20)) + other) == (1, 1)


def test_the_page_says_what_the_choice_costs(timed: Any) -> None:
    found = [timed.Step("m", Mesh(1, 1, 4), 1.0, 3.0), timed.Step("m", Mesh(1, 4, 1), 2.0, 2.0)]
    text = timed.page(found, Cluster.of("CPU"), 7)
    assert "* m: 0 of 1 pairs in order; the mesh predicted fastest took 50% longer than the fastest measured." in text
    assert "7 steps of each mesh" in text
    assert "| m | 1 | 4 | 1 | 2000.0 | 2000.0 | 2 | 1 |" in text


def test_every_mesh_is_planned_for_the_same_work(timed: Any) -> None:
    for plan in timed.plans("GPT-2", Cluster.of("CPU")):
        assert plan.workload.batch * plan.mesh.data == timed.GLOBAL_BATCH
        assert plan.meshes[0].mesh == plan.mesh
        assert plan.meshes[0].step_seconds > 0


def test_a_machine_without_gpu_is_refused(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["gpu_memory.py"])
    with pytest.raises(SystemExit, match="there is no GPU"):
        gpu.main()


def test_gpu_peaks_are_predicted_for_one_device(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plans = [gpu.predict("1B", batch, "none", 80.0) for batch in (1, 2)]
    assert plans[0].total_bytes < plans[1].total_bytes
    # 1.24 billion parameters in bfloat16 with their gradients and moments
    assert plans[0].memory_bytes["parameters"] == pytest.approx(1.236e9 * 2, rel=0.01)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "some device")
    text = gpu.page(
        [gpu.Peak("1B", 1, "none", 2**30, "at the loss", 2**31), gpu.Peak("8B", 8, "none", 2**38, "x", None)]
    )
    assert "| 1B | 1 | none | 1.00 | at the loss | 2.00 | 0.500 |" in text
    assert "| 8B | 8 | none | 256.00 | x | out of memory | - |" in text
