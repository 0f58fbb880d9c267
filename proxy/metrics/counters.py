"""Prometheus: what this proxy counts while it serves, and what a scrape of it shows.

With one process the numbers live in its memory. The workers of `--workers N` write theirs into files that they share
(`share`, prometheus_client's multiprocess mode), so that whichever of them answers a scrape shows all. A worker that
is restarted goes on in its own files, so counters do not fall; what it was doing (gauges) is forgotten with it.

Whatever the store knows (versions, engines, admission) is read from it at each scrape. The path of a call only touches
children that were bound before: see `Metrics.stage`, `over` and `answered`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, values
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from agentrl.domain.schemas import ForkReason, Json
from agentrl.errors import RequestError, StoreError, ValueRefused
from agentrl.store import activity

if TYPE_CHECKING:
    from agentrl.proxy.dialects.dialect import Dialect
    from agentrl.proxy.state import ProxyState

log = logging.getLogger(__name__)
Stage = Literal["render", "begin", "first_token", "sampling", "finish"]
STAGES: tuple[Stage, ...] = ("render", "begin", "first_token", "sampling", "finish")
Outcome = Literal["complete", "failed", "aborted", "lost"]
OUTCOMES: tuple[Outcome, ...] = ("complete", "failed", "aborted", "lost")
Retry = Literal["claimed", "resampled"]
RETRIES: tuple[Retry, ...] = ("claimed", "resampled")
SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0),
)
UNITS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
LOOK_EVERY_S = 1.0
STORE_TIMEOUT_S = 3.0
_shared = False


def share(worker: int) -> None:
    """Keep the numbers in the files of worker `worker` in PROMETHEUS_MULTIPROC_DIR. Before any are made."""
    global _shared
    _shared = True
    shared: Any = values.MultiProcessValue(lambda: worker)  # type: ignore[no-untyped-call]

    class Value(shared):  # type: ignore[misc]
        """Without the lock, which costs as much as the rest: each number is written by one thread, and nobody forks."""

        def inc(self, amount: float) -> None:
            self._value += amount
            self._file.write_value(self._key, self._value, 0.0)

    values.ValueClass = Value


class Metrics:
    """The numbers of one proxy process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._calls: dict[tuple[str, int], Counter] = {}
        self._seconds: dict[str, Histogram] = {}
        self._calls_total = self._counter("calls", "Model calls that were answered.", "dialect", "status")
        self._call_seconds = self._histogram("call_seconds", "From the request to the end of its answer.", "dialect")
        self.in_flight = self._gauge("calls_in_flight", "Model calls that are being answered.")
        self.streams = self._gauge("streams_open", "Those of them whose answer is streamed.")
        stages = self._histogram("stage_seconds", "Parts of a call of the policy.", "stage")
        self._stages: dict[Stage, Histogram] = {stage: stages.labels(stage) for stage in STAGES}
        tokens = self._counter("tokens", "Tokens of recorded calls.", "kind")
        self._prompt, self._cached, self._output = (tokens.labels(kind) for kind in ("prompt", "cached", "output"))
        outcomes = self._counter("interactions", "Calls of the policy by how they ended.", "outcome")
        self._outcomes: dict[Outcome, Counter] = {outcome: outcomes.labels(outcome) for outcome in OUTCOMES}
        forks = self._counter("forks", "Calls that could not extend an earlier one, by the reason.", "reason")
        self._forks: dict[str, Counter] = {reason: forks.labels(reason) for reason in ForkReason}
        self._bridged = self._counter("bridged", "Calls whose prompt extends an earlier call's tokens.")
        retries = self._counter("retries", "Retries that got an answer that was there, or were sampled anew.", "how")
        self._retries: dict[Retry, Counter] = {how: retries.labels(how) for how in RETRIES}
        self._errors = self._counter("errors", "Requests of any route that were refused or failed.", "status", "code")
        self._batch_units = self._histogram(
            "commit_units", "Units of work that were committed together.", buckets=UNITS
        )
        self._batch_seconds = self._histogram("commit_seconds", "How long a group commit took.")
        self._queued = self._gauge("commit_queue", "Units of work that wait for a commit.")
        self._running = self._gauge("engine_calls", "Calls of ours that an engine is working on.", "engine")
        self._usable = self._gauge("engine_usable", "How many proxy processes would send a call to it.", "engine")

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"agentrl_{name}", text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"agentrl_{name}", text, labels, registry=self.registry, multiprocess_mode="livesum")

    def _histogram(self, name: str, text: str, *labels: str, buckets: Iterable[float] = SECONDS) -> Histogram:
        return Histogram(f"agentrl_{name}", text, labels, registry=self.registry, buckets=tuple(buckets))

    # -- a call ----------------------------------------------------------------------------------------------------

    def stage(self, stage: Stage, since: float) -> float:
        """A part of a call is over that began at `since` (`time.perf_counter`); returns now."""
        now = time.perf_counter()
        self._stages[stage].observe(now - since)
        return now

    def answered(
        self, *, prompt_tokens: int, cached_tokens: int, output_tokens: int, fork_reason: str | None, bridged: bool
    ) -> None:
        """A call was committed as complete."""
        self._outcomes["complete"].inc()
        self._prompt.inc(prompt_tokens)
        self._output.inc(output_tokens)
        if cached_tokens:
            self._cached.inc(cached_tokens)
        if bridged:
            self._bridged.inc()
        if fork_reason is not None:
            self._forks[fork_reason].inc()

    def ended(self, outcome: Outcome, count: int = 1) -> None:
        """Calls ended in another way."""
        self._outcomes[outcome].inc(count)

    def retried(self, how: Retry) -> None:
        """A retry claimed an answer, or had to be sampled anew."""
        self._retries[how].inc()

    def begun(self) -> float:
        """A request for an answer is here; returns when (`time.perf_counter`)."""
        self.in_flight.inc()
        return time.perf_counter()

    def over(self, dialect: str, status: int, since: float) -> None:
        """Its answer has left, whole or not."""
        self.in_flight.dec()
        calls = self._calls.get((dialect, status))
        if calls is None:
            calls = self._calls[dialect, status] = self._calls_total.labels(dialect, status)
        calls.inc()
        seconds = self._seconds.get(dialect)
        if seconds is None:
            seconds = self._seconds[dialect] = self._call_seconds.labels(dialect)
        seconds.observe(time.perf_counter() - since)

    # -- everything else -------------------------------------------------------------------------------------------

    def refused(self, status: int, code: str) -> None:
        """A request was answered with an error."""
        self._errors.labels(status, code).inc()

    def committed(self, units: int, seconds: float) -> None:
        """The writer's thread has committed a batch."""
        self._batch_units.observe(units)
        self._batch_seconds.observe(seconds)

    def look(self, state: ProxyState) -> None:
        """Read what counts itself: the writer's queue, the pool."""
        self._queued.set(state.database.queued)
        for engine in state.pool.engines:
            name = engine.url
            self._running.labels(name).set(engine.running)
            self._usable.labels(name).set(engine.state != "dead")


async def watch(state: ProxyState) -> None:
    """Look for ever, for the other workers' scrapes."""
    while _shared:
        state.metrics.look(state)
        await asyncio.sleep(LOOK_EVERY_S)


async def scrape(state: ProxyState, accept: str) -> tuple[bytes, str]:
    """Everything in Prometheus' text format, and its content type. A database that is away is shown, not waited for."""
    state.metrics.look(state)
    facts = None
    try:
        async with asyncio.timeout(STORE_TIMEOUT_S):
            facts = await state.read(activity.facts, state.run_id)
    except (StoreError, TimeoutError) as error:
        log.warning("a scrape goes without the store: %s", error or "it did not answer in time")
    encode, content_type = choose_encoder(accept)
    return await asyncio.to_thread(_encoded, state.metrics.registry, facts, encode), content_type


def engine_calls(state: ProxyState) -> dict[str, int]:
    """How many calls each engine works on, over all workers of this port; by its address without a password."""
    state.metrics.look(state)
    families = _counts(state.metrics.registry).collect()
    running = next(family for family in families if family.name == "agentrl_engine_calls")
    return {sample.labels["engine"]: int(sample.value) for sample in running.samples}


def _counts(registry: CollectorRegistry) -> CollectorRegistry:
    """What this process counted, or all workers did."""
    if not _shared:
        return registry
    shown = CollectorRegistry()
    MultiProcessCollector(shown, os.environ["PROMETHEUS_MULTIPROC_DIR"])  # type: ignore[no-untyped-call]
    return shown


def _encoded(registry: CollectorRegistry, facts: Json | None, encode: Callable[[Any], bytes]) -> bytes:
    shown = CollectorRegistry()
    shown.register(_counts(registry))  # a registry collects, as a collector does
    shown.register(_Store(facts))
    return encode(shown)


class _Store:
    """What the store knows, read before."""

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


class _Counted:
    """An answer on its way, and what is to be noted once it has left."""

    __slots__ = ("_dialect", "_metrics", "_response", "_since")

    def __init__(self, metrics: Metrics, dialect: Dialect, since: float, response: Response) -> None:
        self._metrics, self._dialect, self._since, self._response = metrics, dialect, since, response

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        streamed = getattr(self._response, "streamed", isinstance(self._response, StreamingResponse))
        status = self._response.status_code
        if streamed:
            self._metrics.streams.inc()
        try:
            await self._response(scope, receive, send)
        except BaseException as error:
            status = _status_of(self._dialect, error)
            raise
        finally:
            if streamed:
                self._metrics.streams.dec()
            self._metrics.over(self._dialect.name, status, self._since)


def counted(dialect: Dialect, handler: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Any]]:
    """A model route whose calls are counted from the request to the last byte of the answer."""

    async def handle(request: Request) -> _Counted:
        metrics: Metrics = request.app.state.proxy.metrics
        since = metrics.begun()
        try:
            response = await handler(request)
        except BaseException as error:
            metrics.over(dialect.name, _status_of(dialect, error), since)
            raise
        return _Counted(metrics, dialect, since, response)

    return handle


def _status_of(dialect: Dialect, error: BaseException) -> int:
    """The status that app.py answers an error of a handler with."""
    match error:
        case RequestError():
            return dialect.status(error)
        case ValueRefused():
            return 400
        case StoreError():
            return 503
        case asyncio.CancelledError():
            return 499
    return 500
