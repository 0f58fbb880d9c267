"""Which processes of a run share a host: a pure function of the parts and the size of a host.

A slot is a place for a host. The job's script gives each slot one of the job's hosts, and a spare host when that is
lost: then all processes of the slot move together. Processes with GPUs are packed, larger ones first. Processes without
GPUs go where the fewest CPUs are needed so far.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agentrl.errors import ConfigError
from agentrl.placement.part_spec import PartSpec


@dataclass(frozen=True, slots=True)
class Placed:
    """A process of a part and its slot."""

    spec: PartSpec
    rank: int
    slot: int


@dataclass(slots=True)
class _Slot:
    gpus: int
    cpus: float = 0.0
    parts: tuple[str, ...] = ()


def slots_of(parts: Sequence[PartSpec], gpus_per_host: int, at_least: int = 1) -> list[Placed]:
    """Give each process one of `at_least` slots, or of as few more as GPUs and `spread` need.

    The result has the order of the parts and their ranks.

    Raises ConfigError for a process that needs more GPUs than a host has.
    """
    slots = [_Slot(gpus_per_host) for _ in range(at_least)]
    found: dict[tuple[str, int], int] = {}
    for spec in sorted(parts, key=lambda spec: -spec.need.gpus):
        if spec.need.gpus > gpus_per_host:
            raise ConfigError(
                f"{spec.name} needs {spec.need.gpus} GPUs on one host, but slurm.gpus_per_node is {gpus_per_host}"
            )
        for rank in range(spec.ranks):
            found[spec.name, rank] = slot = _slot_for(spec, slots, gpus_per_host)
            slots[slot].gpus -= spec.need.gpus
            slots[slot].cpus += spec.need.cpus
            slots[slot].parts += (spec.name,)
    return [Placed(spec, rank, found[spec.name, rank]) for spec in parts for rank in range(spec.ranks)]


def _slot_for(spec: PartSpec, slots: list[_Slot], gpus_per_host: int) -> int:
    """The slot of a part's next process: one that has room, else a new one."""
    room = [number for number, slot in enumerate(slots) if slot.gpus >= spec.need.gpus]
    if spec.spread == "one_per_host":
        room = [number for number in room if spec.name not in slots[number].parts]
    if not room:
        slots.append(_Slot(gpus_per_host))
        return len(slots) - 1
    if spec.need.gpus and spec.spread == "pack":
        return room[0]
    spread = spec.spread == "spread"
    return min(room, key=lambda number: (spread and slots[number].parts.count(spec.name), slots[number].cpus, number))
