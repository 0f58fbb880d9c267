"""Judges a traced step on given GPUs: whether it fits, how long it takes, and the bytes that it moves.

seconds = scoring + first microbatch + (n − 1) · further microbatches + optimizer
a phase = longer of (arithmetic and memory traffic, gathering and reducing shards) + collectives that it waits for
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from agentrl.trainer.metrics.devices import Device
from agentrl.trainer.planning.collective_trace import Route, Traffic, seconds
from agentrl.trainer.planning.memory_trace import Holds, Peak
from agentrl.trainer.planning.step_trace import FIRST, LAST, OPTIMIZER, SCORING, Effort, StepTrace
from agentrl.trainer.planning.workload import Workload

RESERVED = 2.0 * 2**30
"""Bytes of a GPU that the driver, kernels and collectives' buffers take."""
FRAGMENTED = 1.08
"""Memory that the allocator holds, over what is used."""
HOST_BANDWIDTH = 200e9
"""Bytes per second of a host's memory, for AdamW on the CPU."""
ADAM_BYTES = 28.0
"""Bytes that AdamW reads and writes for each parameter in float32."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """Hosts with equal GPUs."""

    device: Device
    gpus: int  # of a host
    hosts: int
    network: float = 50e9  # bytes per second and GPU in one direction, between hosts

    @property
    def total(self) -> int:
        """All GPUs."""
        return self.gpus * self.hosts


@dataclass(frozen=True, slots=True)
class Estimate:
    """A step on given GPUs."""

    peak: Peak
    part: str  # of the step, where the peak is
    needed: float  # bytes of a GPU, with what the driver and fragmentation take
    available: float
    host_bytes: float  # of a host's memory, with cpu_offload
    microbatches: int  # of each data rank
    seconds: float
    waiting: float  # of these, seconds in which collectives keep the GPU waiting
    flops: float  # of one rank's step
    traffic: dict[Route, Traffic]  # of one rank's step
    mfu: float  # share of a GPU's peak arithmetic

    @property
    def fits(self) -> bool:
        """Whether the step fits in a GPU's memory."""
        return self.needed <= self.available


def estimate(
    trace: StepTrace, work: Workload, budget: int, data_ranks: int, ranks: int, cluster: Cluster, *, offload: bool
) -> Estimate:
    """The step of a batch on a cluster. `budget`: tokens of a microbatch, which a longer trajectory exceeds."""
    part, peak = trace.worst
    if offload:
        peak = without_state(peak, trace, ranks)
    tokens = max(budget, work.tokens)
    count = max(1, ceil(work.distinct / (tokens * data_ranks)))
    first, last = trace.efforts[FIRST], trace.efforts[LAST]
    scoring = trace.efforts.get(SCORING, Effort())
    parts = [(scoring, count / trace.passes), (first, 1), (last, count - 1), (trace.efforts[OPTIMIZER], 1)]
    total = waiting = flops = 0.0
    traffic: dict[Route, Traffic] = {}
    for effort, times in parts:
        busy, wait = _phase(effort, cluster)
        total, waiting, flops = total + times * (busy + wait), waiting + times * wait, flops + times * effort.flops
        for route, t in effort.traffic.items():
            traffic[route] = traffic.get(route, Traffic()) + t * times
    host_bytes = 0.0
    if offload:
        own = trace.trained / ranks
        total += count * 3 * 4 * trace.parameters / ranks / (cluster.device.host_gb_s * 1e9)
        total += own * min(cluster.gpus, ranks) * ADAM_BYTES / HOST_BANDWIDTH
        host_bytes = (4 * trace.parameters + 12 * trace.trained) / ranks * min(cluster.gpus, ranks)
    needed = peak.total * FRAGMENTED + RESERVED
    return Estimate(
        peak=peak,
        part=part,
        needed=needed,
        available=cluster.device.memory_bytes,
        host_bytes=host_bytes,
        microbatches=count,
        seconds=total,
        waiting=waiting,
        flops=flops,
        traffic=traffic,
        mfu=flops / (total * cluster.device.flops),
    )


def _phase(effort: Effort, cluster: Cluster) -> tuple[float, float]:
    """Seconds in which the GPU computes, and in which it waits for collectives."""
    link, network = cluster.device.link_gb_s * 1e9, cluster.network
    shards = seconds(effort.traffic, link, network, "shards")
    tensors = seconds(effort.traffic, link, network, "tensors")
    return effort.seconds, max(0.0, shards - effort.seconds) + tensors


def without_state(peak: Peak, trace: StepTrace, ranks: int) -> Peak:
    """The peak with parameters, moments and this rank's part of the gradients in the host's memory."""
    gradients = max(0.0, peak.held.get(Holds.GRADIENTS, 0) - 4 * trace.trained / ranks)
    moved = {Holds.PARAMETERS: 0, Holds.MOMENTS: 0, Holds.GRADIENTS: round(gradients)}
    return Peak({what: size for what, size in (peak.held | moved).items() if size})
