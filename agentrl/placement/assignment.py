"""Assigns hosts and GPUs to the engines and the trainer of a run: a pure function of `resources` and the hosts.

Larger parts are placed first, each on the first host that has room. A part larger than every host takes equal shares
of several hosts, which start as one gang. A trainer may also be split where no host has room for all of its ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agentrl.configs.resources_config import Resources
from agentrl.errors import ConfigError
from agentrl.placement.hosts import Host

TRAINER = "trainer"


@dataclass(frozen=True, slots=True)
class Share:
    """The resources of a part on one host. `gpus` is empty on a CPU."""

    host: str
    gpus: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Assigned:
    """A part and its shares, one a host; more than one is a gang."""

    part: str
    processes: int
    shares: tuple[Share, ...]


@dataclass(frozen=True, slots=True)
class Assignment:
    """The engines in order, then the trainer. `colocated`: the trainer is on the engines' GPUs."""

    parts: tuple[Assigned, ...] = ()
    colocated: bool = False

    def gpus(self, part: str, host: str | None = None) -> tuple[str, ...]:
        """The GPUs of a part on `host`, or on the only host that it has; empty on a CPU and for an unknown part."""
        shares = [share for found in self.parts if found.part == part for share in found.shares]
        return next((share.gpus for share in shares if host in (None, share.host)), ())


@dataclass(frozen=True, slots=True)
class _Need:
    """The GPUs of a part. Each host's share is a multiple of `unit`; `splits`: it may leave a host that has no room."""

    part: str
    gpus: int
    unit: int = 1
    splits: bool = False


def engine_name(index: int) -> str:
    """The name of an engine that the run starts."""
    return f"engine-{index}"


def assign(
    resources: Resources,
    hosts: Sequence[Host],
    *,
    engines_on_gpu: bool,
    trainer_on_gpu: bool,
    engines: int | None = None,
) -> Assignment:
    """Give each part its hosts and GPUs. `engines` replaces `resources.engines.count`: 0 when others start them.

    Raises ConfigError, in one line, when the parts do not fit on the hosts.
    """
    size, trainer = resources.engines, resources.trainer
    count = size.count if engines is None else engines
    needs = [_Need(engine_name(index), size.gpus if engines_on_gpu else 0) for index in range(count)]
    together = trainer.tensor * trainer.context  # ranks that exchange most; a tensor group never leaves its host
    unit = together if together <= max(len(host.gpus) for host in hosts) else trainer.tensor
    ranks = _Need(TRAINER, trainer.ranks if trainer_on_gpu else 0, unit=unit, splits=True)
    processes = {need.part: size.gpus for need in needs} | {TRAINER: trainer.ranks}
    share = engines_on_gpu and trainer_on_gpu and count > 0
    if share and resources.colocated:
        found, colocated = _together(needs, ranks, hosts), True
    else:
        try:
            found, colocated = _placed([*needs, ranks], hosts), False
        except ConfigError as too_few:
            if not share or resources.colocated is not None:
                raise
            try:
                found, colocated = _together(needs, ranks, hosts), True
            except ConfigError:
                raise too_few from None
    return Assignment(tuple(Assigned(part, processes[part], found[part]) for part in processes), colocated)


def _together(needs: Sequence[_Need], ranks: _Need, hosts: Sequence[Host]) -> dict[str, tuple[Share, ...]]:
    """Place the engines, and the trainer on all of their GPUs."""
    if (total := sum(need.gpus for need in needs)) != ranks.gpus:
        raise ConfigError(
            f"resources: colocated parts need equally many GPUs: {len(needs)} × {needs[0].gpus} of the engines, "
            f"{ranks.gpus} of the trainer"
        )
    found = _placed(needs, hosts)
    taken = {(share.host, gpu) for shares in found.values() for share in shares for gpu in share.gpus}
    assert len(taken) == total
    shares = (Share(host.name, tuple(gpu for gpu in host.gpus if (host.name, gpu) in taken)) for host in hosts)
    return found | {ranks.part: tuple(share for share in shares if share.gpus)}


def _placed(needs: Sequence[_Need], hosts: Sequence[Host]) -> dict[str, tuple[Share, ...]]:
    total, have = sum(need.gpus for need in needs), sum(len(host.gpus) for host in hosts)
    if total > have:
        wanted = ", ".join(f"{need.part} {need.gpus}" for need in _largest_first(needs)[:4])
        raise ConfigError(f"resources need {total} GPUs ({wanted}{', …' * (len(needs) > 4)}), but {_described(hosts)}")
    free = {host.name: list(host.gpus) for host in hosts}
    found: dict[str, tuple[Share, ...]] = {}
    for need in _largest_first(needs):
        if not need.gpus:
            found[need.part] = (Share(hosts[len(found) % len(hosts)].name, ()),)
            continue
        names, each = _hosts_for(need, free, hosts)
        found[need.part] = tuple(Share(name, tuple(free[name][:each])) for name in names)
        for name in names:
            del free[name][:each]
    return found


def _hosts_for(need: _Need, free: dict[str, list[str]], hosts: Sequence[Host]) -> tuple[list[str], int]:
    """The fewest hosts with room for equal shares of a part, and the GPUs of a share."""
    largest = max(len(host.gpus) for host in hosts)
    for count in range(1, len(hosts) + 1):
        each, rest = divmod(need.gpus, count)
        if rest or each % need.unit or (count > 1 and need.gpus <= largest and not need.splits):
            continue
        names = [name for name, gpus in free.items() if len(gpus) >= each]
        if len(names) >= count:
            return names[:count], each
    room = ", ".join(f"{name} {len(gpus)}" for name, gpus in free.items() if gpus) or "none"
    raise ConfigError(f"resources: {need.part} needs {need.gpus} GPUs in equal shares of hosts; free are: {room}")


def _largest_first(needs: Sequence[_Need]) -> list[_Need]:
    return sorted(needs, key=lambda need: -need.gpus)


def _described(hosts: Sequence[Host]) -> str:
    sizes = sorted({len(host.gpus) for host in hosts}, reverse=True)
    if len(hosts) == 1:
        return f"this host has {sizes[0] or 'none'}"
    return f"{len(hosts)} hosts have {' or '.join(map(str, sizes))} each"
