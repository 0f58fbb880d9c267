"""The GPUs that agentrl knows: arithmetic, memory and bandwidths, by label and by the name that the driver reports.

Figures are NVIDIA's, from the data sheets: dense bfloat16 products with float32 sums, without sparsity; memory that
programs can use; bandwidths in one direction. Without torch, so that a plan can be made on any machine.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from agentrl.errors import UserError, did_you_mean

GIB = 2**30
PCIE4, PCIE5 = 32.0, 64.0
"""GB/s of 16 lanes in one direction."""
MEMORY_MARGIN = 0.1
"""Reported memory may differ from the table's by this share: drivers and error correction take some."""


@dataclass(frozen=True, slots=True)
class Device:
    """One kind of GPU."""

    label: str  # as `agentrl plan --gpus` takes it: product, GB of memory, form where it has several
    product: str  # a word of the driver's name
    form: str  # regular expression of what in that name tells it from other forms of the product; empty: nothing
    tflops: float  # 10¹² operations per second
    memory_gib: float
    memory_gb_s: float
    link_gb_s: float  # to the other GPUs of its host: NVLink, or PCIe where there is none
    power_w: int  # largest power limit
    host_gb_s: float = PCIE4  # to the host's memory

    @property
    def flops(self) -> float:
        """Peak operations per second."""
        return self.tflops * 1e12

    @property
    def memory_bytes(self) -> int:
        """Memory that programs can use."""
        return int(self.memory_gib * GIB)


DEVICES = (
    Device("GB300-279", "GB300", "", 2500, 277, 8000, 900, 1400, 450),
    Device("GB200-186", "GB200", "", 2500, 184, 8000, 900, 1200, 450),
    Device("B300-268", "B300", "", 2250, 267, 8000, 900, 1100, PCIE5),
    Device("B200-180", "B200", "", 2250, 178, 7700, 900, 1000, PCIE5),
    Device("GH200-96", "GH200", "480GB|96GB", 989, 94.5, 4000, 450, 900, 450),
    Device("GH200-144", "GH200", "144G", 989, 140, 4900, 450, 900, 450),
    Device("H200-141", "H200", "SXM", 989, 139.8, 4800, 450, 700, PCIE5),
    Device("H200-141-NVL", "H200", "NVL", 835, 139.8, 4800, 450, 600, PCIE5),
    Device("H100-80", "H100", "SXM|HBM3", 989, 79.1, 3350, 450, 700, PCIE5),
    Device("H100-80-PCIe", "H100", "PCIe", 756, 79.1, 2000, PCIE5, 350, PCIE5),
    Device("H100-94-NVL", "H100", "NVL", 835, 93.1, 3900, 300, 400, PCIE5),
    Device("H800-80", "H800", "SXM|HBM3", 989, 79.1, 3350, 200, 700, PCIE5),
    Device("H800-80-PCIe", "H800", "PCIe", 756, 79.1, 2000, PCIE5, 350, PCIE5),
    Device("H20-96", "H20", "", 148, 95.0, 4000, 450, 500, PCIE5),
    Device("H20-141", "H20", "3e", 148, 139.8, 4800, 450, 500, PCIE5),
    Device("A100-80", "A100", "SXM", 312, 79.1, 2039, 300, 400),
    Device("A100-80-PCIe", "A100", "PCIe", 312, 79.1, 1935, PCIE4, 300),
    Device("A100-40", "A100", "SXM", 312, 39.4, 1555, 300, 400),
    Device("A100-40-PCIe", "A100", "PCIe", 312, 39.4, 1555, PCIE4, 250),
    Device("A800-80", "A800", "SXM", 312, 79.1, 2039, 200, 400),
    Device("A800-80-PCIe", "A800", "PCIe", 312, 79.1, 1935, PCIE4, 300),
    Device("L40S-48", "L40S", "", 362, 44.4, 864, PCIE4, 350),
    Device("L40-48", "L40", "", 181, 44.4, 864, PCIE4, 300),
    Device("L4-24", "L4", "", 121, 22.0, 300, PCIE4, 72),
    Device("A40-48", "A40", "", 150, 44.4, 696, PCIE4, 300),
    Device("A10-24", "A10", "", 125, 22.1, 600, PCIE4, 150),
    Device("A10G-24", "A10G", "", 70, 22.1, 600, PCIE4, 300),
    Device("RTX-6000-Ada-48", "RTX 6000 Ada", "", 364, 47.4, 960, PCIE4, 300),
    Device("RTX-A6000-48", "RTX A6000", "", 155, 47.4, 768, PCIE4, 300),
    Device("RTX-5090-32", "RTX 5090", "", 209, 31.4, 1792, PCIE5, 575, PCIE5),
    Device("RTX-4090-24", "RTX 4090", "", 165, 23.6, 1008, PCIE4, 450),
    Device("RTX-3090-24", "RTX 3090", "", 71, 23.6, 936, PCIE4, 350),
)
"""Of the forms of one product, the one that is assumed without further facts comes first."""


def labelled(label: str) -> Device:
    """The device of a label, `H100-80-PCIe`, or the first whose label begins with it, `H100`.

    Raises UserError for any other word.
    """
    wanted = label.casefold()
    for device in DEVICES:
        if device.label.casefold() == wanted:
            return device
    for device in DEVICES:
        if device.label.casefold().startswith(f"{wanted}-"):
            return device
    raise UserError(f"no GPU named {label!r} is known{did_you_mean(label, [device.label for device in DEVICES])}")


def candidates(name: str, memory_bytes: int | None = None) -> list[Device]:
    """The devices that a driver may mean by a name such as `NVIDIA H100 80GB HBM3`, the likeliest first.

    None for a part of a device (MIG), which has a share of its arithmetic.
    """
    found = [d for d in DEVICES if re.search(rf"\b{re.escape(d.product)}\b", name)]
    if re.search(r"\bMIG\b", name):
        return []
    found = _narrowed(found, [bool(d.form and re.search(d.form, name, re.IGNORECASE)) for d in found])
    if memory_bytes is None:
        return found
    return _narrowed(found, [abs(d.memory_bytes - memory_bytes) < MEMORY_MARGIN * memory_bytes for d in found])


def reported(name: str, memory_bytes: int | None = None, power_w: float | None = None) -> Device | None:
    """The device that a driver reports. Where its name does not tell the form, its memory does, and then the largest
    power limit that the driver allows. None for a device that is not known.
    """
    found = candidates(name, memory_bytes)
    if power_w is not None:
        found.sort(key=lambda device: abs(device.power_w - power_w))
    return found[0] if found else None


def _narrowed(devices: Sequence[Device], fits: Sequence[bool]) -> list[Device]:
    """Those that fit; all where none does."""
    return [device for device, fit in zip(devices, fits, strict=True) if fit] or list(devices)
