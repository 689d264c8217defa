"""Every device's numbers have a source, and hold together."""

from __future__ import annotations

import dataclasses

import pytest

from autoshard.devices import DEVICES, Device, find_device
from autoshard.errors import InvalidArgument


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
def test_every_number_has_a_source(device: Device) -> None:
    assert set(device.sources) == {field.name for field in dataclasses.fields(Device)} - {"name", "sources"}
    assert all(device.sources.values())


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
def test_numbers_are_in_their_units(device: Device) -> None:
    assert 2**33 < device.memory_bytes < 2**40
    assert 1e11 < device.memory_bandwidth < 1e13
    assert 1e10 < device.link_bandwidth < device.memory_bandwidth
    assert 1e9 < device.network_bandwidth < device.link_bandwidth
    assert all(1e11 < rate < 1e16 for rate in device.flops.values())
    assert device.flops["float64"] <= device.flops["float32"] <= device.peak("float16")


def test_dense_rates_are_taken() -> None:
    # data sheets print twice these, with sparsity
    assert DEVICES["H100-80"].flops["bfloat16"] == pytest.approx(989e12, rel=1e-3)
    assert DEVICES["A100-80"].flops["bfloat16"] == 312e12
    assert DEVICES["B200"].flops["float8"] == 4.5e15


@pytest.mark.parametrize("name", ["h100-80", "H100_80", "h100 80", " H100-80 "])
def test_names_are_read_leniently(name: str) -> None:
    assert find_device(name) is DEVICES["H100-80"]


def test_an_unknown_device_lists_near_names() -> None:
    with pytest.raises(InvalidArgument, match="the device 'h100' is not known") as refused:
        find_device("h100")
    assert refused.value.help == "did you mean H200, H100-96, H100-80?"
    assert "allowed: A100-40, A100-80, H100-80" in str(refused.value)


def test_what_a_device_lacks_is_computed_wider() -> None:
    turing, ampere = DEVICES["T4"], DEVICES["A100-80"]
    assert turing.peak("bfloat16") == turing.flops["float32"]
    assert ampere.peak("float8_e4m3fn") == ampere.flops["bfloat16"]
    assert DEVICES["H200"].peak("float8_e5m2") == DEVICES["H200"].flops["float8"]
    assert ampere.peak("float64") == ampere.flops["float64"]
    with pytest.raises(InvalidArgument, match="no FLOP/s for bfloat16"):
        dataclasses.replace(turing, flops={"float16": 1e12}).peak("bfloat16")
