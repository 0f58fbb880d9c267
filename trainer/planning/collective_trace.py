"""Counts collective operations: messages and bytes, by kind and by how many ranks and hosts take part.

Bytes are those of the whole message of a rank: of a gather its result, of a scatter its input, of the others the
tensor. `seconds` estimates how long they take, as a ring of ranks moves them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

KINDS = {
    "all_gather": ("allgather", "all_gather"),
    "reduce_scatter": ("reduce_scatter",),
    "all_reduce": ("allreduce", "all_reduce"),
    "all_to_all": ("alltoall", "all_to_all"),
    "broadcast": ("broadcast", "scatter"),
}
"""Kind → parts of the names of torch's operations."""
LATENCY_S = 20e-6
"""Of one message."""
EFFICIENCY = 0.8
"""Share of a link's bandwidth that collectives reach."""


@dataclass(frozen=True, slots=True, order=True)
class Route:
    """The kind of a message, and its ranks."""

    kind: str
    ranks: int
    hosts: int
    of: str  # "shards" of FSDP, which overlap with computation, or "tensors" that computation waits for


@dataclass(frozen=True, slots=True)
class Traffic:
    """The messages of one rank over one route. Fractions appear where a step is scaled."""

    messages: float = 0.0
    size: float = 0.0  # bytes

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.messages + other.messages, self.size + other.size)

    def __mul__(self, times: float) -> Traffic:
        return Traffic(self.messages * times, self.size * times)


class CollectiveTrace:
    """Counts the collective operations of one rank; a host has `gpus` ranks."""

    def __init__(self, gpus: int) -> None:
        self._gpus = gpus
        self.messages: Counter[Route] = Counter()
        self.sizes: Counter[Route] = Counter()

    @property
    def traffic(self) -> dict[Route, Traffic]:
        """Everything so far."""
        return {route: Traffic(count, self.sizes[route]) for route, count in self.messages.items()}

    def watch(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Count an operation, if it is a collective one."""
        if func.namespace not in ("c10d", "_c10d_functional", "_dtensor"):
            return
        kind = next((k for k, parts in KINDS.items() if any(part in func.name() for part in parts)), None)
        if kind is None:
            return
        from torch.distributed._tools.fake_collectives import CollectiveOp

        members = dist.get_process_group_ranks(CollectiveOp.get_process_group(func, args))
        if len(members) == 1:
            return
        hosts = len({rank // self._gpus for rank in members})
        of = "shards" if func.namespace == "c10d" else "tensors"
        route = Route(kind, len(members), hosts, of)
        self.messages[route] += 1
        size = CollectiveOp.get_comm_tensor_size(func, result, args, kwargs)
        self.sizes[route] += size // 2 if kind == "all_to_all" and func.namespace != "c10d" else size


def seconds(traffic: Mapping[Route, Traffic], link: float, network: float, of: str) -> float:
    """Time of the messages `of` a kind, in a row. Bytes per second and GPU in one direction: `link` between the GPUs of
    a host, `network` between hosts.

    A gather or scatter brings (n − 1) / n of the message to each of n ranks, a reduction twice that. Between H hosts,
    (H − 1) / H of it crosses the network, through all of a host's GPUs at once when they all take part.
    """
    total = 0.0
    for route, t in traffic.items():
        if route.of != of:
            continue
        times = 2.0 if route.kind == "all_reduce" else 1.0
        inside = times * t.size * (route.ranks - 1) / route.ranks / (link * EFFICIENCY)
        across = 0.0
        if route.hosts > 1:
            here = route.ranks / route.hosts
            share = 1.0 if route.kind == "all_to_all" else here  # every rank's part of an exchange is its own
            across = times * t.size * (route.hosts - 1) / route.hosts / (share * network * EFFICIENCY)
        total += max(inside, across) + t.messages * LATENCY_S
    return total
