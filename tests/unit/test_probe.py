"""Measuring this machine: what times mean, and the whole way once with tiny sizes."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from autoshard import probe as probing
from autoshard.cli import main
from autoshard.cluster import Cluster
from autoshard.errors import InvalidArgument
from autoshard.probe import Sizes, cluster_of, probe

TINY = Sizes(matmul=16, copied_bytes=2**12, payload_bytes=2**12, repetitions=1)
SECONDS = {
    "float32": 1e-3,
    "bfloat16": 2e-3,
    "copy": 1e-2,
    "all_reduce": 3e-3,
    "all_gather": 1e-3,
    "all_reduce few": 6e-4,
    "all_gather few": 1e-4,
}


def test_times_become_rates() -> None:
    sizes = Sizes(matmul=100, copied_bytes=10**6, payload_bytes=4 * 10**6)
    cluster = cluster_of(SECONDS, 4, sizes)
    assert cluster.device.flops == {"float32": pytest.approx(2e9), "bfloat16": pytest.approx(1e9)}
    assert cluster.device.memory_bandwidth == pytest.approx(2e8)
    # an all-reduce sends 6 quarters of 4 MB in 3 ms: slower than 3 quarters in 1 ms
    assert cluster.link_bandwidth == pytest.approx(2e9)
    assert cluster.link_latency == pytest.approx(1e-4)
    assert (cluster.overlaps, cluster.sustained) == (False, True)
    slower = cluster_of({**SECONDS, "all_gather": 1e-2}, 4, sizes)
    assert slower.link_bandwidth == pytest.approx(3e8)


def test_one_process_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="1 processes have no link"):
        probe(1)


def test_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probing.probe, "__defaults__", (2, TINY, 300.0))
    path = tmp_path / "machine.toml"
    done = CliRunner().invoke(main, ["probe", "--processes", "2", "--out", str(path)])
    assert done.exit_code == 0, done.output
    cluster = Cluster.load(path)
    assert (cluster.devices_per_node, cluster.overlaps, cluster.sustained) == (2, False, True)
    assert set(cluster.device.flops) == {"float64", "float32", "bfloat16", "float16"}
    assert 2**20 < cluster.device.memory_bytes < 2**50
    assert 0 < cluster.link_latency < 100
    assert str(path) in done.output
