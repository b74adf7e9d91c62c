"""What devices and the links between them can do, by their vendors' figures.

Peaks are those of dense matrices with fp32 sums, bandwidths those of one direction. What programs
reach of them is in ``step_time.py``, but for matrices: there it differs by device, and was
measured by one program on most of them. Memory is what the driver's tool (``nvidia-smi``,
``rocm-smi``) shows.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType

from scalai.core.errors import RefusedError

GB, MIB, TERA = 1e9, 2.0**20, 1e12
HOST_COPY = 25e9
"""Bytes/s between a device and its host's memory (PCIe 4 x16: 31.5 GB/s; CUDA's bandwidthTest with
pinned memory on an A100)."""
HOST_MEMORY = 125e9
"""Bytes of host memory a device, where nothing says it (NVIDIA DGX A100 datasheet: 1 TB for 8)."""
PRECISIONS = ("bf16", "fp16", "fp8", "fp32")
MEASURED = "mamf-finder, stas00/ml-engineering, compute/accelerator"
UNMEASURED = "not measured; as of the devices of its vendor that were"


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator, in the host that it commonly comes in.

    Attributes:
        peaks: FLOP/s by precision.
        memory: Bytes.
        memory_bandwidth, link, network: Bytes/s: of the memory, to the other devices of the host,
            and to other hosts (the device's share of what its host has).
        per_host: Devices that ``link`` connects.
        matrix_efficiency: Share of the peak that the best matrix product reaches.
        source, matrix_source: Where these come from.
    """

    name: str
    peaks: Mapping[str, float]
    memory: float
    memory_bandwidth: float
    link: float
    network: float
    per_host: int
    matrix_efficiency: float
    source: str
    matrix_source: str = UNMEASURED
    host_memory: float = 0.0
    """Bytes of a host; 0: unknown."""

    @property
    def host_share(self) -> float:
        """Bytes of host memory for each of its devices."""
        return self.host_memory / self.per_host or HOST_MEMORY

    def peak(self, precision: str) -> float:
        """Return FLOP/s in ``precision``.

        Raises:
            RefusedError: The device has no such precision.
        """
        if precision not in self.peaks:
            known = ", ".join(self.peaks)
            raise RefusedError(f"{self.name} has no peak for {precision}. Use one of: {known}.")
        return self.peaks[precision]


def _device(
    name: str, half_tflops: float, memory_mib: int, memory_gb_s: float, link_gb_s: float,
    network_gbit_s: float, per_host: int, efficiency: float, source: str,
    *, fp8_tflops: float = 0.0, fp32_tflops: float, has_bf16: bool = True,
    measured: bool = False,
) -> Device:  # fmt: skip
    peaks = {"bf16": half_tflops} if has_bf16 else {}
    peaks |= {"fp16": half_tflops, "fp32": fp32_tflops}
    peaks |= {"fp8": fp8_tflops} if fp8_tflops else {}
    return Device(
        name, MappingProxyType({key: value * TERA for key, value in peaks.items()}),
        memory_mib * MIB, memory_gb_s * GB, link_gb_s * GB, network_gbit_s * GB / 8, per_host,
        efficiency, source, MEASURED if measured else UNMEASURED,
    )  # fmt: skip


_TABLE = (
    _device(
        "v100-32gb", 125, 32_510, 900, 150, 50, 8, 0.80, fp32_tflops=15.7, has_bf16=False,
        source="NVIDIA V100 datasheet (SXM2; January 2020): 300 GB/s NVLink in both directions; "
        "DGX-1 datasheet: 4 x EDR 100 Gb/s",
    ),
    _device(
        "a100-40gb", 312, 40_536, 1555, 300, 200, 8, 0.859, fp32_tflops=19.5, measured=True,
        source="NVIDIA A100 datasheet (SXM4; June 2021): 600 GB/s NVLink; DGX A100 datasheet: "
        "8 x HDR 200 Gb/s",
    ),
    _device(
        "a100-80gb", 312, 81_251, 2039, 300, 200, 8, 0.859, fp32_tflops=19.5, measured=True,
        source="NVIDIA A100 datasheet (SXM4; June 2021): 600 GB/s NVLink; DGX A100 datasheet: "
        "8 x HDR 200 Gb/s",
    ),
    _device(
        "a100-80gb-pcie", 312, 81_251, 1935, 31, 25, 8, 0.822, fp32_tflops=19.5, measured=True,
        source="NVIDIA A100 datasheet (PCIe 4 x16: 64 GB/s; June 2021); a host with one "
        "200 Gb/s adapter",
    ),
    _device(
        "a800-80gb", 312, 81_251, 2039, 200, 200, 8, 0.859, fp32_tflops=19.5,
        source="NVIDIA A800 datasheet: as the A100, 400 GB/s NVLink",
    ),
    _device(
        "h100-80gb", 989.4, 81_559, 3352, 450, 400, 8, 0.801, fp8_tflops=1978.9, fp32_tflops=66.9,
        measured=True,
        source="NVIDIA H100 datasheet (SXM5; dense is half of what it states with sparsity): "
        "900 GB/s NVLink; DGX H100 datasheet: 8 x NDR 400 Gb/s",
    ),
    _device(
        "h100-80gb-pcie", 756, 81_559, 2000, 63, 50, 8, 0.66, fp8_tflops=1513, fp32_tflops=51,
        measured=True,
        source="NVIDIA H100 datasheet (PCIe 5 x16: 128 GB/s); a host with one 400 Gb/s adapter",
    ),
    _device(
        "h800-80gb", 989.4, 81_559, 3352, 200, 400, 8, 0.801, fp8_tflops=1978.9, fp32_tflops=66.9,
        source="NVIDIA H800 datasheet: as the H100, 400 GB/s NVLink",
    ),
    _device(
        "h20-96gb", 148, 97_871, 4000, 450, 400, 8, 0.80, fp8_tflops=296, fp32_tflops=44,
        source="NVIDIA H20 datasheet: 900 GB/s NVLink; network as DGX H100",
    ),
    _device(
        "h200-141gb", 989.4, 143_771, 4800, 450, 400, 8, 0.803, fp8_tflops=1978.9, fp32_tflops=66.9,
        measured=True,
        source="NVIDIA H200 datasheet (SXM; dense is half): 900 GB/s NVLink; DGX H200 datasheet: "
        "8 x NDR 400 Gb/s",
    ),
    _device(
        "b200-180gb", 2250, 183_359, 8000, 900, 400, 8, 0.776, fp8_tflops=4500, fp32_tflops=75,
        measured=True,
        source="NVIDIA DGX B200 datasheet (an eighth; dense is half): 14.4 TB/s NVLink, 8 x 400 "
        "Gb/s",
    ),
    _device(
        "gb200-186gb", 2500, 189_471, 8000, 900, 400, 72, 0.776, fp8_tflops=5000, fp32_tflops=80,
        source="NVIDIA GB200 NVL72 datasheet (a 72nd; dense is half): 130 TB/s NVLink, 400 Gb/s a "
        "device",
    ),
    _device(
        "l40s-48gb", 362, 46_068, 864, 31, 25, 8, 0.80, fp8_tflops=733, fp32_tflops=91.6,
        source="NVIDIA L40S datasheet (dense; PCIe 4 x16: 64 GB/s); a host with one 200 Gb/s "
        "adapter",
    ),
    _device(
        "a10-24gb", 125, 23_028, 600, 31, 12.5, 8, 0.80, fp32_tflops=31.2,
        source="NVIDIA A10 datasheet (PCIe 4 x16: 64 GB/s); a host with one 100 Gb/s adapter",
    ),
    _device(
        "rtxa6000-48gb", 154.8, 49_140, 768, 31, 25, 4, 0.80, fp32_tflops=38.7,
        source="NVIDIA RTX A6000 datasheet (dense; PCIe 4 x16: 64 GB/s); a host of 4 with one 100 "
        "Gb/s adapter",
    ),
    _device(
        "rtx4090-24gb", 165.2, 24_564, 1008, 31, 12.5, 8, 0.80, fp8_tflops=330.3, fp32_tflops=82.6,
        source="NVIDIA Ada architecture whitepaper, appendix A (fp32 sums; PCIe 4 x16); a host "
        "with one 100 Gb/s adapter",
    ),
    _device(
        "mi250x-64gb", 191.5, 65_520, 1638, 50, 100, 8, 0.767, fp32_tflops=47.9, measured=True,
        source="AMD MI250X datasheet (one of its two dies, which is one device; 50 GB/s to a "
        "neighbour); a host with 4 x 200 Gb/s",
    ),
    _device(
        "mi300x-192gb", 1307.4, 196_592, 5300, 448, 400, 8, 0.601, fp8_tflops=2614.9,
        fp32_tflops=163.4, measured=True,
        source="AMD MI300X datasheet (dense; 7 x 64 GB/s Infinity Fabric); a host with 8 x 400 "
        "Gb/s",
    ),
)  # fmt: skip

DEVICES: Mapping[str, Device] = MappingProxyType({device.name: device for device in _TABLE})
"""Known devices by name."""
_SHORT = {"a100": "a100-80gb", "v100": "v100-32gb", "h100": "h100-80gb", "a6000": "rtxa6000-48gb",
          "h100pcie": "h100-80gb-pcie"}  # fmt: skip
_WORDS = re.compile(r"nvidia|amd|tesla|geforce|instinct|sxm\d?|nvl72|hbm\d?e?|[\s_-]")
"""What tells no two devices apart; ``PCIe`` and ``NVL`` of a card do."""

FIGURES = {
    "tflops": "peak of dense bf16 products, TFLOP/s",
    "memory-gb": "memory, GB",
    "memory-gb-s": "bandwidth of its memory, GB/s",
    "link-gb-s": "bandwidth to the other devices of its host, GB/s in one direction",
    "network-gbit-s": "its share of its host's network, Gbit/s",
    "per-host": "devices of a host",
}
"""What is needed of a device that the table does not know, by its flag."""
HOST_FIGURE = {"host-memory-gb": "memory of a host, GB"}
"""The same, with a default for any device."""


def device_named(name: str) -> Device:
    """Return a device by a name such as ``A100-80GB``, ``h100`` or ``NVIDIA H100 80GB HBM3``.

    Raises:
        RefusedError: The table does not know it; the message says which figures to give.
    """
    key = _key(name)
    wanted = _key(_SHORT.get(key, key))
    for known, device in DEVICES.items():
        if _key(known) == wanted:
            return device
    for known, device in DEVICES.items():
        if known.partition("-")[0] == key:
            return device
    flags = "; ".join(f"--{flag}: {what}" for flag, what in FIGURES.items())
    raise RefusedError(
        f"{name!r} is not in the table of devices ({', '.join(DEVICES)}). Use one of these, or "
        f"give its figures: {flags}."
    )


def custom_device(name: str, figures: Mapping[str, float]) -> Device:
    """Return a device of given figures, by the names of ``FIGURES``; those that are left out are
    the table's, where it knows the device.

    Raises:
        RefusedError: The table does not know it, and a figure is missing, or one is not positive.
    """
    wrong = sorted(flag for flag, value in figures.items() if not value > 0)
    if wrong:
        raise RefusedError(f"--{wrong[0]} {figures[wrong[0]]:g} is not a size; use more than 0.")
    missing = [flag for flag in FIGURES if flag not in figures]
    try:
        base = device_named(name)
    except RefusedError:
        if missing:
            if figures:
                needed = "; ".join(f"--{flag}: {FIGURES[flag]}" for flag in missing)
                raise RefusedError(f"of {name!r} are still needed: {needed}.") from None
            raise
        base = Device(name, {}, 0, 0, 0, 0, 1, 0.8, "as given")
    if not figures:
        return base
    peaks = dict(base.peaks)
    if "tflops" in figures:
        half = figures["tflops"] * TERA
        peaks |= {"bf16": half, "fp16": half}
        peaks.setdefault("fp32", half / 8)
    scaled = {
        "memory": ("memory-gb", GB), "memory_bandwidth": ("memory-gb-s", GB),
        "link": ("link-gb-s", GB), "network": ("network-gbit-s", GB / 8),
        "per_host": ("per-host", 1), "host_memory": ("host-memory-gb", GB),
    }  # fmt: skip
    changed = {
        field: figures[flag] * unit for field, (flag, unit) in scaled.items() if flag in figures
    }
    if "per_host" in changed:
        changed["per_host"] = int(changed["per_host"])
    source = f"{base.source}; as given: {', '.join(sorted(figures))}"
    assert set(changed) <= {field.name for field in fields(Device)}
    return replace(base, peaks=MappingProxyType(peaks), source=source, **changed)  # type: ignore[arg-type]


def _key(name: str) -> str:
    return _WORDS.sub("", name.lower())
