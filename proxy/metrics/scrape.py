"""Answers Prometheus scrapes, with the counters of all workers of this port and figures from the store.

Versions, engines, sessions and admission are read from the store at each scrape.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector

from agentrl.domain.schemas import Json
from agentrl.errors import StoreError
from agentrl.proxy.engines.engine_state import EngineState
from agentrl.proxy.engines.pool import EnginePool
from agentrl.proxy.metrics.counters import EngineLoad, Metrics, is_shared
from agentrl.proxy.run_store import RunStore
from agentrl.store import activity

log = logging.getLogger(__name__)
OBSERVE_EVERY_S = 1.0
STORE_TIMEOUT_S = 3.0


@dataclass(frozen=True, slots=True)
class Scrape:
    """Reads the metrics of this port. With `public`, `/metrics` needs no key."""

    metrics: Metrics
    store: RunStore
    pool: EnginePool
    public: bool = False

    def observe(self) -> None:
        """Set the gauges of this process: the writer's queue and the load of the engines."""
        loads = (
            EngineLoad(engine.url, engine.running, engine.state is not EngineState.DEAD) for engine in self.pool.engines
        )
        self.metrics.observe(self.store.database.queued, loads)

    async def watch(self) -> None:
        """Keep the gauges current for scrapes that other workers answer; returns at once if there are no others."""
        while is_shared():
            self.observe()
            await asyncio.sleep(OBSERVE_EVERY_S)

    async def text(self, accept: str) -> tuple[bytes, str]:
        """Everything in Prometheus' text format, and its content type. Does not wait for an unavailable database."""
        self.observe()
        facts = None
        try:
            async with asyncio.timeout(STORE_TIMEOUT_S):
                facts = await self.store.read(activity.facts, self.store.run_id)
        except (StoreError, TimeoutError) as error:
            log.warning("a scrape goes without the store: %s", error or "it did not answer in time")
        encode, content_type = choose_encoder(accept)
        return await asyncio.to_thread(encoded, self.metrics.registry, facts, encode), content_type

    def engine_calls(self) -> dict[str, int]:
        """How many calls each engine works on, over all workers of this port; by its address without a password."""
        self.observe()
        families = _counts(self.metrics.registry).collect()
        running = next(family for family in families if family.name == "agentrl_engine_calls")
        return {sample.labels["engine"]: int(sample.value) for sample in running.samples}


def _counts(registry: CollectorRegistry) -> CollectorRegistry:
    """The counters of this process or, where they are shared, of all workers."""
    if not is_shared():
        return registry
    shown = CollectorRegistry()
    MultiProcessCollector(shown, os.environ["PROMETHEUS_MULTIPROC_DIR"])  # type: ignore[no-untyped-call]
    return shown


def encoded(registry: CollectorRegistry, facts: Json | None, encode: Callable[[Any], bytes]) -> bytes:
    """The counters and the store's `facts`, as `encode` writes them."""
    shown = CollectorRegistry()
    shown.register(_counts(registry))  # a registry can be registered as a collector
    shown.register(_Store(facts))
    return encode(shown)


class _Store:
    """Collects the metrics of `facts`, which were read from the store."""

    def __init__(self, facts: Json | None) -> None:
        self._facts = facts

    def collect(self) -> Iterator[Metric]:
        facts = self._facts
        yield _gauge("store_up", "Whether the database answered this scrape.", float(facts is not None))
        if facts is None:
            return
        run = facts["run"]
        yield _gauge("run_version", "The weight version that the run serves.", run["version"])
        yield _gauge("run_step", "Optimizer steps that were published.", run["published_step"])
        yield _gauge("run_target_steps", "Optimizer steps that were asked for.", run["target_steps"])
        for name in ("admitted", "returned", "running", "ready"):
            yield _gauge(f"groups_{name}", f"Training groups: {name}.", run[f"{name}_groups"])
        yield _gauge("traces_unsent", "Ended sessions whose spans wait to be sent.", facts["unsent_traces"])
        yield _gauge("tasks_skipped", "Tasks that the curriculum has skipped.", run["skipped_tasks"])
        if facts["step"] is not None and facts["step"]["staleness_max"] is not None:
            yield _gauge("staleness_max", "Age of the newest step's oldest token.", facts["step"]["staleness_max"])
        sessions = GaugeMetricFamily("agentrl_sessions", "Sessions that are not yet built.", labels=["status"])
        for status, count in facts["sessions"].items():
            sessions.add_metric([status], count)
        yield sessions
        states = GaugeMetricFamily("agentrl_engine_state", "1: its state in the store.", labels=["engine", "state"])
        versions = GaugeMetricFamily("agentrl_engine_version", "The weight version that it reports.", labels=["engine"])
        for engine in facts["engines"]:
            name = engine["url"]
            states.add_metric([name, engine["state"]], 1.0)
            if engine["version"] is not None:
                versions.add_metric([name], engine["version"])
        yield states
        yield versions


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"agentrl_{name}", text, value=value)
