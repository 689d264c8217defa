"""Named devices: what one can hold, compute and move, each number with where it is from.

Bandwidths count one direction: a data sheet's "900 GB/s NVLink" is both, so 450e9 here. ``memory_bytes`` takes a data
sheet's GB as 2**30 bytes, as makers of memory do: a driver reports up to 1.5 % less, which is for the margin that a
planner leaves. Boards that keep error correction in the memory itself (L40S, T4) lose 1/16 of it, taken off here.

FLOP/s are dense, without structured sparsity, at the boost clock. ``float32`` is what ``torch.matmul`` does by default:
without TF32. ``bfloat16`` and ``float16`` accumulate in float32, as torch does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autoshard.errors import InvalidArgument, near


@dataclass(frozen=True)
class Device:
    """One device of a cluster.

    Attributes:
        name: such as ``"H100-80"``.
        memory_bytes: what a program can allocate at most.
        flops: dense FLOP/s by dtype: some of ``"float64"``, ``"float32"``, ``"bfloat16"``, ``"float16"``, ``"float8"``.
        memory_bandwidth: bytes/s between the device and its memory.
        link: what joins the devices of a node: ``"NVLink"``, ``"xGMI"``, ``"PCIe"``, ``"UPI"``, or what was measured.
        link_bandwidth: bytes/s one way, from one device to all others of its node together.
        network_bandwidth: bytes/s one way per device between nodes, as the device is usually paired.
        devices_per_node: how many devices share the fast link.
        sources: for each of these names but ``name``, the document that its value is from.
    """

    name: str
    memory_bytes: int
    flops: Mapping[str, float]
    memory_bandwidth: float
    link: str
    link_bandwidth: float
    network_bandwidth: float
    devices_per_node: int
    sources: Mapping[str, str]

    def peak(self, dtype: str) -> float:
        """Return the FLOP/s of ``dtype``, by torch's name; what the device lacks is computed in a wider one it has."""
        wider = {"float8": ("bfloat16", "float16", "float32")}
        name = "float8" if dtype.startswith("float8") else dtype
        for each in (name, *wider.get(name, ("float32",))):
            if each in self.flops:
                return self.flops[each]
        raise InvalidArgument(
            f"the device {self.name} has no FLOP/s for {dtype}", got=f"{dtype}; allowed: {', '.join(self.flops)}"
        )


_A100 = "NVIDIA A100 Tensor Core GPU data sheet (SXM), nvidia.com/en-us/data-center/a100"
_DGX_A100 = "NVIDIA DGX A100 data sheet: 8 GPUs, 8 x 200 Gb/s InfiniBand"
_H100 = "NVIDIA H100 Tensor Core GPU data sheet (SXM), nvidia.com/en-us/data-center/h100"
_DGX_H100 = "NVIDIA DGX H100 data sheet: 8 GPUs, 8 x 400 Gb/s InfiniBand"
_H100_96 = "torchtitan, benchmarks/llama3_h100_202412_torchtitan.md: 96 GB HBM2e, 2.4 TB/s, 400 Gb/s per GPU, 8 a host"
_H200 = "NVIDIA H200 Tensor Core GPU data sheet (SXM), nvidia.com/en-us/data-center/h200"
_DGX_H200 = "NVIDIA DGX H200 data sheet: 8 GPUs, 8 x 400 Gb/s InfiniBand"
_BLACKWELL = "NVIDIA Blackwell data sheet 3384703 (HGX B200; its sparse figures halved)"
_DGX_B200 = "NVIDIA DGX B200 data sheet: 8 GPUs of 180 GB, 64 TB/s together, 8 x 400 Gb/s"
_GB200 = "NVIDIA GB200 NVL72 data sheet, nvidia.com/en-us/data-center/gb200-nvl72 (72 GPUs; its sparse figures halved)"
_DGX_GB200 = "NVIDIA DGX GB200 data sheet: one 400 Gb/s adapter per GPU"
_GB300 = "NVIDIA GB300 NVL72 data sheet, nvidia.com/en-us/data-center/gb300-nvl72 (72 GPUs; its sparse figures halved)"
_DGX_GB300 = "NVIDIA DGX GB300 data sheet: one 800 Gb/s adapter per GPU"
_MI300X = "AMD Instinct MI300X data sheet: matrix rates, 7 links of 128 GB/s both ways"
_MI300X_PLATFORM = "AMD Instinct MI300X platform data sheet: 8 devices, one 400 Gb/s adapter each"
_L40S = "NVIDIA L40S data sheet 28413: 48 GB GDDR6 with ECC, PCIe 4.0 x16"
_L40S_NODE = "Amazon EC2 g6e.48xlarge: 8 L40S, 400 Gb/s a node"
_ADA = "NVIDIA Ada GPU architecture white paper, appendix A (FP32 accumulation), PCIe 4.0 x16"
_RTX_BLACKWELL = "NVIDIA RTX Blackwell GPU architecture white paper, appendix A (FP32 accumulation), PCIe 5.0 x16"
_DESKTOP_NODE = "assumption: 8 boards and one 100 Gb/s adapter a node; no maker sells such a node"
_T4 = "NVIDIA T4 data sheet: 16 GB GDDR6 with ECC, PCIe 3.0 x16"
_T4_NODE = "Amazon EC2 g4dn.metal: 8 T4, 100 Gb/s a node"
_XEON = "Intel Xeon Platinum 8480+: 56 cores at 2.0 GHz, AVX-512 (64 float32 FLOP a cycle) and AMX (1024 bfloat16)"
_XEON_MEMORY = "Intel Xeon Platinum 8480+: 8 channels of DDR5-4800; 512 GiB a socket is an assumption"
_XEON_LINK = "Intel Xeon Platinum 8480+: two sockets over 3 UPI links of 16 GT/s, 2 bytes a transfer"
_XEON_NODE = "assumption: one 100 Gb/s adapter for two sockets; measure a machine with `autoshard probe`"


def _sources(board: str, node: str) -> dict[str, str]:
    fields = ("memory_bytes", "flops", "memory_bandwidth", "link", "link_bandwidth")
    return {**dict.fromkeys(fields, board), "network_bandwidth": node, "devices_per_node": node}


_A100_FLOPS = {"float64": 19.5e12, "float32": 19.5e12, "bfloat16": 312e12, "float16": 312e12}
_HOPPER_FLOPS = {"float64": 67e12, "float32": 67e12, "bfloat16": 989.4e12, "float16": 989.4e12, "float8": 1978.9e12}

_ALL = (
    Device("A100-40", 40 * 2**30, _A100_FLOPS, 1555e9, "NVLink", 300e9, 25e9, 8, _sources(_A100, _DGX_A100)),
    Device("A100-80", 80 * 2**30, _A100_FLOPS, 2039e9, "NVLink", 300e9, 25e9, 8, _sources(_A100, _DGX_A100)),
    Device("H100-80", 80 * 2**30, _HOPPER_FLOPS, 3.35e12, "NVLink", 450e9, 50e9, 8, _sources(_H100, _DGX_H100)),
    Device(
        "H100-96",
        96 * 2**30,
        # at the 500 W of its makers' tables it runs below this: they do not know its rate either
        _HOPPER_FLOPS,
        2.4e12,
        "NVLink",
        450e9,
        50e9,
        8,
        _sources(_H100_96, _H100_96) | {"flops": _H100, "link": _H100, "link_bandwidth": _H100},
    ),
    Device("H200", 141 * 2**30, _HOPPER_FLOPS, 4.8e12, "NVLink", 450e9, 50e9, 8, _sources(_H200, _DGX_H200)),
    Device(
        "B200",
        180 * 2**30,
        {"float64": 37e12, "float32": 75e12, "bfloat16": 2.25e15, "float16": 2.25e15, "float8": 4.5e15},
        8e12,
        "NVLink",
        900e9,
        50e9,
        8,
        _sources(_BLACKWELL, _DGX_B200) | {"memory_bytes": _DGX_B200, "memory_bandwidth": _DGX_B200},
    ),
    Device(
        "GB200",
        186 * 2**30,
        {"float64": 40e12, "float32": 80e12, "bfloat16": 2.5e15, "float16": 2.5e15, "float8": 5e15},
        8e12,
        "NVLink",
        900e9,
        50e9,
        72,
        _sources(_GB200, _DGX_GB200),
    ),
    Device(
        "GB300",
        279 * 2**30,
        {"float64": 1.39e12, "float32": 80e12, "bfloat16": 2.5e15, "float16": 2.5e15, "float8": 5e15},
        8e12,
        "NVLink",
        900e9,
        100e9,
        72,
        _sources(_GB300, _DGX_GB300),
    ),
    Device(
        "MI300X",
        192 * 2**30,
        {"float64": 163.4e12, "float32": 163.4e12, "bfloat16": 1307.4e12, "float16": 1307.4e12, "float8": 2614.9e12},
        5.3e12,
        "xGMI",
        448e9,
        50e9,
        8,
        _sources(_MI300X, _MI300X_PLATFORM),
    ),
    Device(
        "L40S",
        45 * 2**30,
        {"float64": 1.43e12, "float32": 91.6e12, "bfloat16": 362.05e12, "float16": 362.05e12, "float8": 733e12},
        864e9,
        "PCIe",
        32e9,
        400e9 / 8 / 8,
        8,
        _sources(_L40S, _L40S_NODE),
    ),
    Device(
        "RTX-4090",
        24 * 2**30,
        {"float64": 1.29e12, "float32": 82.6e12, "bfloat16": 165.2e12, "float16": 165.2e12, "float8": 330.3e12},
        1008e9,
        "PCIe",
        32e9,
        100e9 / 8 / 8,
        8,
        _sources(_ADA, _DESKTOP_NODE),
    ),
    Device(
        "RTX-5090",
        32 * 2**30,
        {"float64": 1.64e12, "float32": 104.8e12, "bfloat16": 209.5e12, "float16": 209.5e12, "float8": 419e12},
        1792e9,
        "PCIe",
        64e9,
        100e9 / 8 / 8,
        8,
        _sources(_RTX_BLACKWELL, _DESKTOP_NODE),
    ),
    Device(
        "T4",
        15 * 2**30,
        {"float64": 0.25e12, "float32": 8.1e12, "float16": 65e12},  # no bfloat16 in hardware
        320e9,
        "PCIe",
        16e9,
        100e9 / 8 / 8,
        8,
        _sources(_T4, _T4_NODE),
    ),
    Device(
        "CPU",
        512 * 2**30,
        {"float64": 3.58e12, "float32": 7.17e12, "bfloat16": 114.7e12},
        307.2e9,
        "UPI",
        96e9,
        100e9 / 8 / 2,
        2,
        _sources(_XEON, _XEON_NODE)
        | {"memory_bytes": _XEON_MEMORY, "memory_bandwidth": _XEON_MEMORY}
        | {"link": _XEON_LINK, "link_bandwidth": _XEON_LINK},
    ),
)

#: Every known device by its name.
DEVICES: Mapping[str, Device] = {device.name: device for device in _ALL}


def find_device(name: str) -> Device:
    """Return a known device, upper or lower case, with ``_`` or a space for ``-``.

    Raises:
        InvalidArgument: there is none of that name; the message lists near ones.
    """
    wanted = name.strip().upper().replace("_", "-").replace(" ", "-")
    if wanted not in DEVICES:
        raise InvalidArgument(
            f"the device {name!r} is not known",
            got=f"{name!r}; allowed: {', '.join(DEVICES)}",
            help=near(wanted, DEVICES),
        )
    return DEVICES[wanted]
