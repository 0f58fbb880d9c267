"""What hosts can never hold, and what they may hold one day."""

from __future__ import annotations

from typing import Any

import pytest

from agentrl.errors import ConfigError
from agentrl.placement.capacity import Capacity, check_capacity
from agentrl.placement.part_spec import Need, PartSpec

GPU_HOST = Capacity(gpus=8, cpus=16, memory_gb=64)
CPU_HOST = Capacity(cpus=4, memory_gb=16)


def part(name: str, ranks: int = 1, spread: Any = "pack", **need: Any) -> PartSpec:
    return PartSpec(name=name, argv=("run",), ranks=ranks, spread=spread, need=Need(**need))


@pytest.mark.parametrize(
    ("parts", "hosts"),
    [
        ([part("trainer", 2, "one_per_host", gpus=8)], [GPU_HOST] * 2),
        ([part("engine-0", gpus=4), part("engine-1", gpus=4), part("proxy", 3)], [GPU_HOST]),
        ([part("rollout", 8, cpus=0.5)], [CPU_HOST]),
        ([part("proxy", 100, cpus=0)], [CPU_HOST]),
        ([part("trainer", 3, "spread", gpus=2)], [GPU_HOST]),
        ([part("rollout", 2, memory_gb=16)], [CPU_HOST] * 2),
        ([], []),
    ],
)
def test_parts_that_fit_are_accepted(parts: list[PartSpec], hosts: list[Capacity]) -> None:
    check_capacity(parts, hosts)


@pytest.mark.parametrize(
    ("parts", "hosts", "said"),
    [
        (
            [part("trainer", 3, "one_per_host", gpus=8)],
            [GPU_HOST, GPU_HOST, CPU_HOST],
            "trainer needs 3 hosts of 8 GPUs; the cluster has 2",
        ),
        (
            [part("engine-0", gpus=16)],
            [GPU_HOST, CPU_HOST],
            "engine-0 needs a host of 16 GPUs; the cluster has 2 hosts with at most 8 GPUs, 16 CPUs, 64 GB",
        ),
        (
            [part("proxy", cpus=8)],
            [CPU_HOST],
            "proxy needs a host of 8 CPUs; the cluster has one host with 0 GPUs, 4 CPUs, 16 GB",
        ),
        (
            [part("engine-0", gpus=1, cpus=2, memory_gb=500)],
            [GPU_HOST],
            "engine-0 needs a host of 1 GPU, 2 CPUs, 500 GB; the cluster has one host with 8 GPUs, 16 CPUs, 64 GB",
        ),
        (
            [part("rollout", 3, memory_gb=10)],
            [CPU_HOST] * 2,
            "rollout needs room for 3 processes of 10 GB; the cluster has it for 2",
        ),
        (
            [part("engine-0", gpus=4), part("trainer", 2, gpus=4)],
            [GPU_HOST],
            "the parts need 12 GPUs (trainer 8, engine-0 4); the cluster has 8",
        ),
        (
            [part("engine-0", gpus=5), part("engine-1", gpus=5), part("trainer", gpus=6)],
            [GPU_HOST, GPU_HOST],
            "engine-0, engine-1, trainer need 3 times 5 GPUs on one host; the cluster has room for 2",
        ),
        ([part("proxy")], [], "proxy needs a host of 1 CPU; the cluster has no hosts"),
    ],
)
def test_a_part_that_fits_on_no_host_is_refused_in_one_line(
    parts: list[PartSpec], hosts: list[Capacity], said: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        check_capacity(parts, hosts)
    assert str(refused.value) == said
