"""The table of GPUs: which device a driver's name, memory and power limit mean."""

from __future__ import annotations

import subprocess
import sys

import pytest

from agentrl.errors import UserError
from agentrl.trainer.metrics.devices import DEVICES, candidates, labelled, reported

GB = 10**9


@pytest.mark.parametrize(
    ("name", "memory_gb", "power_w", "label"),
    [
        ("NVIDIA H100 80GB HBM3", 85.0, None, "H100-80"),
        ("NVIDIA H100 PCIe", 85.0, None, "H100-80-PCIe"),
        ("NVIDIA H100 NVL", 100.0, None, "H100-94-NVL"),
        ("NVIDIA H100", 85.0, 700, "H100-80"),
        ("NVIDIA H100", 85.0, 350, "H100-80-PCIe"),
        ("NVIDIA H100", 100.0, None, "H100-94-NVL"),
        ("NVIDIA H200", 150.1, 700, "H200-141"),
        ("NVIDIA H200", 150.1, 600, "H200-141-NVL"),
        ("NVIDIA H200 NVL", 150.1, None, "H200-141-NVL"),
        ("NVIDIA GH200 480GB", 101.5, None, "GH200-96"),
        ("NVIDIA H20", 102.0, None, "H20-96"),
        ("NVIDIA H20-3e", 150.1, None, "H20-141"),
        ("NVIDIA B200", 191.5, None, "B200-180"),
        ("NVIDIA GB200", 197.6, None, "GB200-186"),
        ("NVIDIA A100-SXM4-40GB", 42.3, None, "A100-40"),
        ("NVIDIA A100-SXM4-80GB", 85.0, None, "A100-80"),
        ("NVIDIA A100-PCIE-40GB", 42.3, None, "A100-40-PCIe"),
        ("NVIDIA A100 80GB PCIe", 85.0, None, "A100-80-PCIe"),
        ("NVIDIA A10", 23.7, None, "A10-24"),
        ("NVIDIA A10G", 23.7, None, "A10G-24"),
        ("NVIDIA L4", 23.6, None, "L4-24"),
        ("NVIDIA L40S", 47.7, None, "L40S-48"),
        ("NVIDIA GeForce RTX 4090", 25.3, None, "RTX-4090-24"),
    ],
)
def test_a_reported_device_is_found(name: str, memory_gb: float, power_w: float | None, label: str) -> None:
    found = reported(name, int(memory_gb * GB), power_w)
    assert found is not None
    assert found.label == label


@pytest.mark.parametrize(
    "name", ["Tesla T4", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "AMD Instinct MI300X", "NVIDIA A100X", ""]
)
def test_other_devices_and_parts_of_devices_are_not_known(name: str) -> None:
    assert reported(name, 85 * GB, 350) is None


def test_the_power_limit_is_needed_only_where_name_and_memory_leave_a_choice() -> None:
    assert len(candidates("NVIDIA H100 80GB HBM3", 85 * GB)) == 1
    assert len(candidates("NVIDIA A100-SXM4-80GB", 85 * GB)) == 1
    assert {d.label for d in candidates("NVIDIA H100", 85 * GB)} == {"H100-80", "H100-80-PCIe"}


def test_a_label_is_whole_or_begins_one() -> None:
    assert {labelled(device.label) for device in DEVICES} == set(DEVICES)
    assert labelled("h100").label == "H100-80"
    assert labelled("A100-40").label == "A100-40"
    with pytest.raises(UserError, match="no GPU named 'H101-80' is known; did you mean 'H100-80'"):
        labelled("H101-80")


def test_no_figure_has_slipped_a_column() -> None:
    for device in DEVICES:
        assert 70 <= device.tflops <= 2500
        assert abs(device.memory_gib / int(device.label.split("-")[-1 - (not device.label[-1].isdigit())]) - 1) < 0.12
        assert 300 <= device.memory_gb_s <= 8000
        assert 32 <= device.link_gb_s <= 900
        assert 72 <= device.power_w <= 1400


def test_the_table_needs_no_torch() -> None:
    code = "import sys; import agentrl.trainer.metrics.devices; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
