"""Devices and what joins them: from a device's name and a few numbers, or from a file that ``autoshard probe`` wrote.

Latencies are of one hop of a ring. Those of named devices are NCCL's own tuning constants for a ring with its Simple
protocol, the one of large messages (``src/graph/tuning.cc``: NVLink 3.4, PCI 5.7, network 14 microseconds). xGMI is
taken as NVLink. Between sockets of a CPU an empirical 50 microseconds stand for gloo over shared memory.

A file names a device and overrides what differs, or describes one that has no name::

    device = "H100-80"                 [device]
    devices_per_node = 4               name = "a machine"
    network_bandwidth = 25e9           memory_bytes = 68719476736
                                       memory_bandwidth = 2e11
                                       flops = { float32 = 3.5e12, bfloat16 = 7e12 }

The keys beside ``device`` are the fields of ``Cluster``; with a table all numbers are needed.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autoshard.devices import Device, find_device
from autoshard.errors import InvalidArgument, near

_LINK_LATENCY = {"NVLink": 3.4e-6, "xGMI": 3.4e-6, "PCIe": 5.7e-6, "UPI": 50e-6}
_NETWORK_LATENCY = 14e-6
#: links that the cores drive which compute
_ON_CORES = frozenset({"UPI", "gloo"})

_COUNTS = frozenset({"devices_per_node", "memory_bytes"})
_BESIDE = ("devices_per_node", "link_bandwidth", "network_bandwidth", "link_latency", "network_latency")
_FLAGS = ("overlaps", "sustained")
_OF_DEVICE = ("name", "memory_bytes", "memory_bandwidth", "flops")
_DTYPES = ("float64", "float32", "bfloat16", "float16", "float8")

_RATE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([MGT])([bB])(/s)?(/node)?")
_POWER = {"M": 1e6, "G": 1e9, "T": 1e12}


@dataclass(frozen=True)
class Cluster:
    """Equal devices in equal nodes.

    Attributes:
        device: what each of them is.
        devices_per_node: how many share the fast link.
        link_bandwidth: bytes/s one way per device, inside a node.
        network_bandwidth: bytes/s one way per device, between nodes.
        link_latency: seconds per hop of a ring inside a node.
        network_latency: seconds per hop of a ring between nodes.
        overlaps: whether collectives run beside compute; not so where the same cores do both.
        sustained: whether rates are what programs were seen to reach, not a data sheet's.
    """

    device: Device
    devices_per_node: int
    link_bandwidth: float
    network_bandwidth: float
    link_latency: float
    network_latency: float
    overlaps: bool = True
    sustained: bool = False

    @staticmethod
    def of(
        device: str | Device = "H100-80",
        devices_per_node: int | None = None,
        interconnect: str | None = None,
        memory: float | None = None,
    ) -> Cluster:
        """Return the cluster of a known device, as it is usually built where nothing else is said.

        Args:
            device: its name, such as ``"H100-80"``, or a device.
            devices_per_node: how many share the fast link.
            interconnect: between nodes, one way: a number, M, G or T, and b (bits) or B (bytes), each second and
                device: ``"400Gb"``, ``"50GB/s"``; with ``/node`` what all devices of a node share: ``"3.2Tb/node"``.
            memory: GiB of one device.

        Raises:
            InvalidArgument: the device is not known, a number is not positive, or ``interconnect`` is no rate.
        """
        found = find_device(device) if isinstance(device, str) else device
        if memory is not None:
            found = replace(found, memory_bytes=int(_positive("memory", memory) * 2**30))
        per_node = found.devices_per_node if devices_per_node is None else _count("devices_per_node", devices_per_node)
        return Cluster(
            found,
            per_node,
            found.link_bandwidth,
            found.network_bandwidth if interconnect is None else bytes_per_second(interconnect, per_node),
            _LINK_LATENCY.get(found.link, _LINK_LATENCY["PCIe"]),
            _NETWORK_LATENCY,
            overlaps=found.link not in _ON_CORES,
        )

    @staticmethod
    def load(path: str | Path) -> Cluster:
        """Read a file that ``save`` wrote, or one written by hand.

        Raises:
            InvalidArgument: it cannot be read, or a key is missing, unknown or has a value that cannot be.
        """
        try:
            data = tomllib.loads(Path(path).read_text())
        except (OSError, ValueError) as error:
            raise InvalidArgument(
                f"cannot read the cluster {path}", got=str(error), help="give a file that `autoshard probe` wrote"
            ) from error
        return _read(data, str(path))

    def to_toml(self) -> str:
        """Return the text that ``load`` reads: the device in full, so that it means the same in a later version."""
        lines = [f"{name} = {getattr(self, name)!r}" for name in _BESIDE]
        lines += [f"{name} = {str(getattr(self, name)).lower()}" for name in _FLAGS]
        device = self.device
        lines += ["", "[device]", f"name = {_quoted(device.name)}", f"memory_bytes = {device.memory_bytes}"]
        lines += [f"memory_bandwidth = {device.memory_bandwidth!r}", "", "[device.flops]"]
        lines += [f"{dtype} = {rate!r}" for dtype, rate in device.flops.items()]
        return "\n".join(lines) + "\n"

    def save(self, path: str | Path) -> None:
        """Write the cluster to ``path``."""
        Path(path).write_text(self.to_toml())


def bytes_per_second(text: str, devices_per_node: int) -> float:
    """Read a rate such as ``"400Gb"``, ``"50GB/s"`` or ``"3.2Tb/node"``: bytes/s one way per device.

    Raises:
        InvalidArgument: it is no such rate.
    """
    found = _RATE.fullmatch(text.strip())
    if not found or not float(found[1]):
        raise InvalidArgument(
            f"{text!r} is no rate",
            at="interconnect",
            got=f"{text!r}; allowed: such as '400Gb', '50GB/s' (each device), '3.2Tb/node'",
            help="b are bits, B are bytes, a second and one way",
        )
    rate = float(found[1]) * _POWER[found[2]] / (8 if found[3] == "b" else 1)
    return rate / devices_per_node if found[5] else rate


def _read(data: Mapping[str, Any], path: str) -> Cluster:
    _known(data, ("device", *_BESIDE, *_FLAGS), path)
    flags = {key: _flag(key, data[key], path) for key in _FLAGS if key in data}
    kind = data.get("device")
    if isinstance(kind, str):
        changed: dict[str, Any] = flags | {key: _number(key, data[key], path) for key in _BESIDE if key in data}
        return replace(Cluster.of(kind), **changed)
    if not isinstance(kind, Mapping):
        raise InvalidArgument(
            "a cluster needs a device",
            at=path,
            got=f"device = {kind!r}; allowed: a name such as 'H100-80', or a table with {', '.join(_OF_DEVICE)}",
        )
    beside = {key: _number(key, _needed(data, key, path), path) for key in _BESIDE}
    return Cluster(_device(kind, beside, path), **beside, **flags)


def _device(data: Mapping[str, Any], beside: Mapping[str, Any], path: str) -> Device:
    _known(data, _OF_DEVICE, f"{path}, [device]")
    name, flops = (_needed(data, key, f"{path}, [device]") for key in ("name", "flops"))
    if not isinstance(name, str) or not name:
        raise InvalidArgument("a device's name is a text", at=f"{path}, [device]", got=f"name = {name!r}")
    if not isinstance(flops, Mapping) or "float32" not in flops:
        allowed = f"a table of {', '.join(_DTYPES)}, float32 at least"
        raise InvalidArgument(
            "a device needs its FLOP/s by dtype", at=f"{path}, [device]", got=f"flops = {flops!r}; allowed: {allowed}"
        )
    _known(flops, _DTYPES, f"{path}, [device.flops]")
    memory, bandwidth = (
        _number(key, _needed(data, key, f"{path}, [device]"), path) for key in ("memory_bytes", "memory_bandwidth")
    )
    fields = ("memory_bytes", "flops", "memory_bandwidth", "link", "link_bandwidth", "network_bandwidth")
    return Device(
        name=name,
        memory_bytes=int(memory),
        flops={dtype: float(_number(dtype, rate, path)) for dtype, rate in flops.items()},
        memory_bandwidth=bandwidth,
        link="measured",
        link_bandwidth=beside["link_bandwidth"],
        network_bandwidth=beside["network_bandwidth"],
        devices_per_node=beside["devices_per_node"],
        sources=dict.fromkeys((*fields, "devices_per_node"), path),
    )


def _known(data: Mapping[str, Any], allowed: tuple[str, ...], at: str) -> None:
    for key in data:
        if key not in allowed:
            raise InvalidArgument(
                f"the key {key!r} is not known",
                at=at,
                got=f"{key!r}; allowed: {', '.join(allowed)}",
                help=near(key, allowed),
            )


def _needed(data: Mapping[str, Any], key: str, at: str) -> Any:
    if key not in data:
        raise InvalidArgument(f"the key {key!r} is missing", at=at, got=f"{', '.join(data) or 'nothing'}")
    return data[key]


def _number(key: str, value: Any, at: str) -> Any:
    return _count(key, value, at) if key in _COUNTS else float(_positive(key, value, at))


def _count(key: str, value: Any, at: str | None = None) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InvalidArgument(f"{key} is {value!r}", at=at, got=f"{key}={value!r}; allowed: a whole number from 1 up")
    return value


def _flag(key: str, value: Any, at: str) -> bool:
    if not isinstance(value, bool):
        raise InvalidArgument(f"{key} is {value!r}", at=at, got=f"{key}={value!r}; allowed: true or false")
    return value


def _positive(key: str, value: Any, at: str | None = None) -> float:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < value < float("inf"):
        raise InvalidArgument(f"{key} is {value!r}", at=at, got=f"{key}={value!r}; allowed: a number above 0")
    return float(value)


def _quoted(text: str) -> str:
    return '"' + "".join(c if c.isprintable() and c not in '"\\' else f"\\u{ord(c):04x}" for c in text) + '"'
