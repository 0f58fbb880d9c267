"""The facts of a publish that the run's timeline keeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from agentrl.domain.schemas import Json
from agentrl.proxy.engines.engine_state import Engine
from agentrl.proxy.engines.version_delivery import KEPT, Delivery, Loaded


def publish_facts(
    version: int, engines: Sequence[Engine], loaded: Mapping[str, Loaded], delivery: Delivery, seconds: float
) -> Json:
    """The facts, each by engine URL but for the version, its bytes and the rate of the whole publish.

    `stall_steps` is an engine's pause in decode steps, as its calls saw them lately. `fetched` are the bytes that its
    host read to prepare the version, and `source` from where.
    """
    steps = {engine.url: engine.step_s for engine in engines}
    prepared = {url: each.prepared for url, each in loaded.items() if each.prepared is not None}
    return {
        "version": version,
        "stall_s": {url: each.stall_s for url, each in loaded.items()},
        "stall_steps": {url: each.stall_s / step for url, each in loaded.items() if (step := steps.get(url))},
        "transport": {url: each.transport for url, each in loaded.items()},
        "prepared_s": {url: each.seconds for url, each in prepared.items()},
        "fetched": {url: each.n_bytes for url, each in prepared.items()},
        "source": {url: each.source for url, each in prepared.items()},
        "verified": {url: each.verified for url, each in loaded.items()},
        "unverified": {url: why for url, each in loaded.items() if (why := _unverified(delivery, each))},
        "bytes": delivery.n_bytes,
        "bytes_per_s": _rate(delivery.n_bytes, seconds),
    }


def _unverified(delivery: Delivery, loaded: Loaded) -> str | None:
    """Why no tensor of an engine was compared with the trainer's; None if some were, or it keeps its version."""
    if loaded.verified or loaded.transport == KEPT:
        return None
    if loaded.transport == "adapter":
        return "no whole weights were loaded"
    if not delivery.digests:
        return "no digests were sent: publish.verify is off, or the engines are not on a CPU"
    return "an engine of several ranks, or one that keeps none of the tensors as they were sent"


def _rate(n_bytes: int | None, seconds: float) -> float | None:
    """Bytes per second over the whole publish."""
    return n_bytes / seconds if n_bytes and seconds > 0 else None
