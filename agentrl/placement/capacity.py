"""Says whether the hosts of a cluster can ever hold the parts of a run, all at once: a pure function.

It refuses only what no assignment can meet. What passes may still wait until other users of the cluster have finished.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agentrl.errors import ConfigError
from agentrl.placement.part_spec import Need, PartSpec


@dataclass(frozen=True, slots=True)
class Capacity:
    """All resources of a host, those in use by others included."""

    gpus: float = 0
    cpus: float = 0
    memory_gb: float = 0

    def processes(self, need: Need) -> float:
        """How many processes with this need the host can hold; infinitely many that need nothing."""
        pairs = ((self.gpus, need.gpus), (self.cpus, need.cpus), (self.memory_gb, need.memory_gb))
        return min((has // needs for has, needs in pairs if needs), default=float("inf"))


def check_capacity(parts: Sequence[PartSpec], hosts: Sequence[Capacity]) -> None:
    """Raise ConfigError, in one line, for a part that is too large, and for parts that are too large together."""
    for part in parts:
        room = [host.processes(part.need) for host in hosts]
        fitting = sum(1 for processes in room if processes)
        each = _text(part.need)
        if not fitting:
            raise ConfigError(f"{part.name} needs a host of {each}; the cluster has {_hosts(hosts)}")
        if part.spread == "one_per_host" and fitting < part.ranks:
            raise ConfigError(f"{part.name} needs {part.ranks} hosts of {each}; the cluster has {fitting}")
        if sum(room) < part.ranks:
            raise ConfigError(
                f"{part.name} needs room for {part.ranks} processes of {each}; the cluster has it for {sum(room):g}"
            )
    _check_sums(parts, hosts)
    for gpus in sorted({part.need.gpus for part in parts} - {0}, reverse=True):
        large = [part for part in parts if part.need.gpus >= gpus]
        wanted, room_for = sum(part.ranks for part in large), sum(host.gpus // gpus for host in hosts)
        if wanted > room_for:
            raise ConfigError(
                f"{_names(large)} need {wanted} times {gpus} GPUs on one host; the cluster has room for {room_for:g}"
            )


def _check_sums(parts: Sequence[PartSpec], hosts: Sequence[Capacity]) -> None:
    for unit, field in (("GPUs", "gpus"), ("CPUs", "cpus"), ("GB of memory", "memory_gb")):
        needs = {part.name: getattr(part.need, field) * part.ranks for part in parts}
        total, has = sum(needs.values()), sum(getattr(host, field) for host in hosts)
        if total > has:
            largest = sorted((name for name in needs if needs[name]), key=lambda name: -needs[name])
            listed = ", ".join(f"{name} {needs[name]:g}" for name in largest[:4]) + ", …" * (len(largest) > 4)
            raise ConfigError(f"the parts need {total:g} {unit} ({listed}); the cluster has {has:g}")


def _text(need: Need) -> str:
    """`8 GPUs, 4 CPUs, 64 GB`. One CPU or less beside other needs is not worth a word."""
    words = [_count(need.gpus, "GPU")] if need.gpus else []
    words += [f"{need.memory_gb:.3g} GB"] if need.memory_gb else []
    if need.cpus > 1 or not words:
        words.insert(bool(need.gpus), _count(need.cpus, "CPU"))
    return ", ".join(words)


def _count(number: float, noun: str) -> str:
    return f"{number:g} {noun}{'s' * (number != 1)}"


def _hosts(hosts: Sequence[Capacity]) -> str:
    """`3 hosts, the largest with 8 GPUs, 16 CPUs, 60 GB`."""
    if not hosts:
        return "no hosts"
    largest = [max(getattr(host, field) for host in hosts) for field in ("gpus", "cpus", "memory_gb")]
    most = f"{_count(largest[0], 'GPU')}, {_count(largest[1], 'CPU')}, {largest[2]:.3g} GB"
    return f"one host with {most}" if len(hosts) == 1 else f"{len(hosts)} hosts with at most {most}"


def _names(parts: Sequence[PartSpec]) -> str:
    return ", ".join(part.name for part in parts[:4]) + ", …" * (len(parts) > 4)
