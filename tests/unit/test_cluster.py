"""Clusters: from names and numbers, and from files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from autoshard.cluster import Cluster, bytes_per_second
from autoshard.devices import DEVICES, find_device
from autoshard.errors import InvalidArgument

FULL = """
devices_per_node = 2
link_bandwidth = 1e9
network_bandwidth = 5e8
link_latency = 1e-4
network_latency = 2e-4
[device]
name = "mine"
memory_bytes = 1024
memory_bandwidth = 2e10
flops = { float32 = 1e11, bfloat16 = 2e11 }
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "cluster.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("name", DEVICES)
def test_a_device_says_how_it_is_built(name: str) -> None:
    cluster, device = Cluster.of(name), find_device(name)
    assert cluster.device is device
    assert (cluster.devices_per_node, cluster.link_bandwidth) == (device.devices_per_node, device.link_bandwidth)
    assert 0 < cluster.link_latency < 1e-4
    assert 0 < cluster.network_latency < 1e-4


def test_what_is_said_is_taken() -> None:
    cluster = Cluster.of("a100-40", devices_per_node=4, interconnect="200Gb", memory=32.5)
    assert cluster.devices_per_node == 4
    assert cluster.network_bandwidth == 25e9
    assert cluster.device == replace(DEVICES["A100-40"], memory_bytes=int(32.5 * 2**30))


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("400Gb", 50e9),
        ("400 Gb/s", 50e9),
        ("50GB", 50e9),
        ("50GB/s", 50e9),
        ("3.2Tb/node", 50e9),
        ("3.2Tb/s/node", 50e9),
        ("800Mb", 1e8),
    ],
)
def test_rates(text: str, rate: float) -> None:
    assert bytes_per_second(text, devices_per_node=8) == pytest.approx(rate)


@pytest.mark.parametrize("text", ["400", "fast", "-4Gb", "0Gb", "400gb", "400Gb/device", "1e3Gb", "", "4 0Gb"])
def test_what_is_no_rate_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match="is no rate") as refused:
        Cluster.of(interconnect=text)
    assert f"got: {text!r}; allowed: such as '400Gb'" in str(refused.value)


@pytest.mark.parametrize(
    "options", [{"devices_per_node": 0}, {"memory": 0}, {"memory": -1.0}, {"memory": float("nan")}]
)
def test_numbers_that_cannot_be_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(InvalidArgument, match="allowed"):
        Cluster.of(**options)  # type: ignore[arg-type]


def test_a_file_names_a_device_and_what_differs(tmp_path: Path) -> None:
    path = written(tmp_path, 'device = "H200"\ndevices_per_node = 4\nnetwork_bandwidth = 25_000_000_000\n')
    assert Cluster.load(path) == replace(Cluster.of("H200"), devices_per_node=4, network_bandwidth=25e9)


def test_a_file_describes_a_device(tmp_path: Path) -> None:
    cluster = Cluster.load(written(tmp_path, FULL))
    assert cluster.device.flops == {"float32": 1e11, "bfloat16": 2e11}
    assert (cluster.device.memory_bytes, cluster.link_latency) == (1024, 1e-4)


@pytest.mark.parametrize("name", ["mine", 'a "quoted" \\ one', "two\nlines", "\u00fcber"])
def test_round_trip(tmp_path: Path, name: str) -> None:
    cluster = Cluster.load(written(tmp_path, FULL))
    cluster = replace(cluster, device=replace(cluster.device, name=name))
    cluster.save(tmp_path / "cluster.toml")
    assert Cluster.load(tmp_path / "cluster.toml") == cluster


def test_what_drives_a_link(tmp_path: Path) -> None:
    assert Cluster.of("H100-80").overlaps
    assert not Cluster.of("CPU").overlaps
    assert not Cluster.of("H100-80").sustained
    cluster = Cluster.load(written(tmp_path, "overlaps = false\nsustained = true" + FULL))
    assert (cluster.overlaps, cluster.sustained) == (False, True)
    named = Cluster.load(written(tmp_path, 'device = "L40S"\noverlaps = false'))
    assert named == replace(Cluster.of("L40S"), overlaps=False)
    cluster.save(tmp_path / "again.toml")
    assert replace(Cluster.load(tmp_path / "again.toml"), device=cluster.device) == cluster


def test_a_known_device_survives_the_round_trip(tmp_path: Path) -> None:
    cluster = Cluster.of("B200", interconnect="100GB")
    cluster.save(tmp_path / "b200.toml")
    again = Cluster.load(tmp_path / "b200.toml")
    assert replace(again, device=cluster.device) == cluster
    assert (again.device.name, again.device.flops) == ("B200", cluster.device.flops)


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ("link_latency = 1e-4", "", "the key 'link_latency' is missing"),
        ("link_latency", "link_latencies", "the key 'link_latencies' is not known"),
        ("memory_bytes = 1024", "", "the key 'memory_bytes' is missing"),
        ("memory_bytes = 1024", "memory_bytes = 1e9", "memory_bytes is 1000000000.0"),
        ("memory_bytes = 1024", "memory_bytes = true", "memory_bytes is True"),
        ("link_bandwidth = 1e9", "link_bandwidth = -1", "link_bandwidth is -1"),
        ("link_latency = 1e-4", "link_latency = 1e-4\noverlaps = 1", "overlaps is 1"),
        ("link_bandwidth = 1e9", "link_bandwidth = inf", "link_bandwidth is inf"),
        ("link_bandwidth = 1e9", "link_bandwidth = '1e9'", "link_bandwidth is '1e9'"),
        ("devices_per_node = 2", "devices_per_node = 0", "devices_per_node is 0"),
        ("devices_per_node = 2", "devices_per_node = 2.5", "devices_per_node is 2.5"),
        ("float32 = 1e11, ", "", "a device needs its FLOP/s by dtype"),
        ("float32 = 1e11", "float32 = 0", "float32 is 0"),
        ("bfloat16 =", "bf16 =", "the key 'bf16' is not known"),
        ('name = "mine"', "name = 3", "a device's name is a text"),
        ("[device]", "[devices]", "the key 'devices' is not known"),
        ("devices_per_node = 2", "devices_per_node", "cannot read the cluster"),
    ],
)
def test_a_spoiled_file_is_refused(tmp_path: Path, old: str, new: str, what: str) -> None:
    assert old in FULL
    with pytest.raises(InvalidArgument, match=r"cluster\.toml") as refused:
        Cluster.load(written(tmp_path, FULL.replace(old, new, 1)))
    assert what in str(refused.value)


def test_a_file_without_device_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="a cluster needs a device"):
        Cluster.load(written(tmp_path, "devices_per_node = 8\n"))
    with pytest.raises(InvalidArgument, match="cannot read the cluster"):
        Cluster.load(tmp_path / "none.toml")
    with pytest.raises(InvalidArgument, match="the device 'h1' is not known"):
        Cluster.load(written(tmp_path, "device = 'h1'\n"))
