"""Which processes share a host of a Slurm job."""

from __future__ import annotations

import pytest

from agentrl.errors import ConfigError
from agentrl.placement.part_spec import Need, PartSpec
from agentrl.placement.slurm.slots import slots_of


def part(name: str, ranks: int = 1, gpus: int = 0, cpus: float = 1, spread: str = "pack") -> PartSpec:
    return PartSpec(name=name, argv=("x",), ranks=ranks, need=Need(gpus=gpus, cpus=cpus), spread=spread)


def slots(*parts: PartSpec, gpus: int = 8, at_least: int = 1) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for process in slots_of(parts, gpus, at_least):
        found.setdefault(process.spec.name, []).append(process.slot)
    return found


def test_processes_with_gpus_are_packed_larger_ones_first() -> None:
    small = [part(f"engine-{index}", gpus=2) for index in range(3)]
    assert slots(*small, part("trainer", gpus=8)) == {"engine-0": [1], "engine-1": [1], "engine-2": [1], "trainer": [0]}


def test_the_order_is_that_of_the_parts() -> None:
    placed = slots_of([part("b", ranks=2), part("a", gpus=8)], 8)
    assert [(process.spec.name, process.rank) for process in placed] == [("b", 0), ("b", 1), ("a", 0)]


def test_one_per_host_never_shares_a_host_with_its_own_part() -> None:
    assert slots(part("trainer", ranks=3, gpus=2, spread="one_per_host"), part("engine-0", gpus=4)) == {
        "trainer": [0, 1, 2],
        "engine-0": [0],
    }


def test_spread_uses_the_hosts_that_are_there() -> None:
    trainer = part("trainer", ranks=2, gpus=8, spread="one_per_host")
    assert slots(trainer, part("proxy", ranks=3, spread="spread"))["proxy"] == [0, 1, 0]


def test_processes_without_gpus_go_where_the_fewest_cpus_are_needed() -> None:
    assert slots(part("big", cpus=8), part("rollout", ranks=4, cpus=2), at_least=2)["rollout"] == [1, 1, 1, 1]


def test_a_process_larger_than_a_host_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"^engine-0 needs 16 GPUs on one host, but slurm.gpus_per_node is 8$"):
        slots(part("engine-0", gpus=16))
