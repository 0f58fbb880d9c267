"""Prometheus metrics that this proxy process counts while it serves.

With one process the numbers are in its memory. The workers of `--workers N` write theirs into shared files (`share`,
prometheus_client's multiprocess mode), so that any worker can answer a scrape for all of them. A worker that is
restarted continues in its own files, so counters do not fall; its gauges are dropped.

A call only touches children that were bound before: see `Metrics.stage`, `over` and `answered`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, values

from agentrl.domain.schemas import ForkReason

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
_shared = False


def share(worker: int) -> None:
    """Keep the numbers in files of worker `worker` in PROMETHEUS_MULTIPROC_DIR. Call it before `Metrics` is created."""
    global _shared
    _shared = True
    shared: Any = values.MultiProcessValue(lambda: worker)  # type: ignore[no-untyped-call]

    class Value(shared):  # type: ignore[misc]
        """A value without a lock, which would double the cost: one thread writes each number, and no process forks."""

        def inc(self, amount: float) -> None:
            self._value += amount
            self._file.write_value(self._key, self._value, 0.0)

    values.ValueClass = Value


def is_shared() -> bool:
    """Whether the numbers are in files that several workers share."""
    return _shared


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """The current load of an engine, as this process knows it."""

    url: str
    calls: int  # calls of this process that the engine works on
    usable: bool


class Metrics:
    """The numbers of one proxy process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._calls: dict[tuple[str, int], Counter] = {}
        self._seconds: dict[str, Histogram] = {}
        self._calls_total = self._counter("calls", "Model calls that were answered.", "dialect", "status")
        self._call_seconds = self._histogram("call_seconds", "From the request to the end of its answer.", "dialect")
        self.in_flight = self._gauge("calls_in_flight", "Model calls that are being answered.")
        self.streams = self._gauge("streams_open", "Model calls whose answer is being streamed.")
        stages = self._histogram("stage_seconds", "Duration of the stages of a policy call.", "stage")
        self._stages: dict[Stage, Histogram] = {stage: stages.labels(stage) for stage in STAGES}
        tokens = self._counter("tokens", "Tokens of recorded calls.", "kind")
        self._prompt, self._cached, self._output = (tokens.labels(kind) for kind in ("prompt", "cached", "output"))
        outcomes = self._counter("interactions", "Policy calls by their outcome.", "outcome")
        self._outcomes: dict[Outcome, Counter] = {outcome: outcomes.labels(outcome) for outcome in OUTCOMES}
        forks = self._counter("forks", "Calls that could not extend an earlier one, by the reason.", "reason")
        self._forks: dict[str, Counter] = {reason: forks.labels(reason) for reason in ForkReason}
        self._bridged = self._counter("bridged", "Calls whose prompt extends an earlier call's tokens.")
        retries = self._counter("retries", "Retries that claimed a recorded answer, or were sampled again.", "how")
        self._retries: dict[Retry, Counter] = {how: retries.labels(how) for how in RETRIES}
        self._errors = self._counter("errors", "Requests of any route that were refused or failed.", "status", "code")
        self._batch_units = self._histogram(
            "commit_units", "Units of work that were committed together.", buckets=UNITS
        )
        self._batch_seconds = self._histogram("commit_seconds", "How long a group commit took.")
        self._queued = self._gauge("commit_queue", "Units of work that wait for a commit.")
        self._running = self._gauge("engine_calls", "Calls of this proxy that an engine is working on.", "engine")
        self._usable = self._gauge("engine_usable", "How many proxy processes would send a call to it.", "engine")

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"agentrl_{name}", text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"agentrl_{name}", text, labels, registry=self.registry, multiprocess_mode="livesum")

    def _histogram(self, name: str, text: str, *labels: str, buckets: Iterable[float] = SECONDS) -> Histogram:
        return Histogram(f"agentrl_{name}", text, labels, registry=self.registry, buckets=tuple(buckets))

    # -- a call ----------------------------------------------------------------------------------------------------

    def stage(self, stage: Stage, since: float) -> float:
        """A stage of a call that began at `since` (`time.perf_counter`) has ended; returns the time."""
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
        """Calls ended without a complete answer."""
        self._outcomes[outcome].inc(count)

    def retried(self, how: Retry) -> None:
        """A retry claimed a recorded answer, or had to be sampled again."""
        self._retries[how].inc()

    def begun(self) -> float:
        """A model call has arrived; returns the time (`time.perf_counter`)."""
        self.in_flight.inc()
        return time.perf_counter()

    def over(self, dialect: str, status: int, since: float) -> None:
        """A model call that began at `since` has been answered, completely or not."""
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
        """The writer thread has committed a batch of `units`."""
        self._batch_units.observe(units)
        self._batch_seconds.observe(seconds)

    def observe(self, queued: int, engines: Iterable[EngineLoad]) -> None:
        """Set the gauges: units of work that wait for a commit, and the load of each engine."""
        self._queued.set(queued)
        for engine in engines:
            self._running.labels(engine.url).set(engine.calls)
            self._usable.labels(engine.url).set(engine.usable)
