"""A modelled fleet: hosts with links of a given speed, engines on them, and a clock that jumps from event to event.

The product's own planners decide who reads from whom (`next_fetches`) and which engines change (`next_wave`). Modelled
are the links, the time to stage a version in an engine, and the pause.

    host: absent ─► fetching ─► present        engine: serving ─► staging ─► ready ─► paused ─► serving the version
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from agentrl.proxy.engines.fan_out import ORIGIN, Copy, Stage, next_fetches
from agentrl.proxy.engines.waves import Candidate, Need, next_wave

NOTHING_LEFT = 1.0
"""Bytes below which a transfer has ended."""


@dataclass(frozen=True, kw_only=True)
class Links:
    """Bytes per second."""

    host: float  # of a host, each way
    origin: float  # of the origin, over all of its readers
    reader: float = math.inf  # of one reader of the origin
    latency_s: float = 0.001  # before the first byte of a transfer


@dataclass(frozen=True, kw_only=True)
class Way:
    """How a version gets to the engines."""

    links: Links
    n_bytes: float  # that each host reads
    origins: int  # hosts that read from the origin at once
    fan_out: int = 0  # hosts that one host serves at once; 0: hosts do not serve each other
    relays: bool = False  # a host passes on each file as soon as it has it
    file_bytes: float = 512e6  # size of a file of the version
    prepared: bool = True  # read and staged before the pause; else read during the pause
    stage_bps: float = 16e9  # bytes per second at which a host stages versions in its engines
    whole_bytes: float = 0.0  # of a version
    swap_s: float = 0.2
    serving_share: float = 0.75
    parallel: int = 32


@dataclass
class Outcome:
    """What a modelled publish took."""

    all_present_s: float = 0.0  # until every host had the version
    all_serve_s: float = 0.0  # until every engine served it
    least_serving: float = 1.0  # smallest share of the engines that took calls
    stall_s: float = 0.0  # the longest pause


@dataclass
class _Transfer:
    host: str
    source: str | None
    left: float
    starts_at: float


@dataclass
class Fleet:
    """One publish to `hosts` hosts of `engines` engines each."""

    way: Way
    hosts: int
    engines: int
    now: float = 0.0
    outcome: Outcome = field(default_factory=Outcome)

    def publish(self) -> Outcome:
        """Run until every engine serves the version."""
        self._stages = {f"h{n:04}": Stage.ABSENT for n in range(self.hosts)}
        self._sources: dict[str, str | None] = {}
        self._transfers: dict[str, _Transfer] = {}
        self._candidates = {
            f"{host}/e{n}": Candidate(url=f"{host}/e{n}", need=Need.NOTHING if self.way.prepared else Need.NOW)
            for host in self._stages
            for n in range(self.engines)
        }
        self._paused_at: dict[str, float] = {}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = 0
        if self.way.prepared:
            self._fetch()
        else:
            self._swap()
        while self._events or self._transfers:
            self._advance()
        return self.outcome

    # -- reading ---------------------------------------------------------------------------------------------------

    def _fetch(self) -> None:
        while chosen := next_fetches(self._copies(), fan_out=self.way.fan_out, origins=self.way.origins):
            for host, source in chosen.items():
                self._stages[host], self._sources[host] = Stage.FETCHING, source
                self._begin(host, source)

    def _copies(self) -> list[Copy]:
        return [
            Copy(host=host, stage=stage, source=self._sources.get(host), relays=self.way.relays)
            for host, stage in self._stages.items()
        ]

    def _available(self, t: _Transfer) -> float:
        """Bytes that the source of a transfer has to pass on now, beyond what was transferred."""
        source = self._transfers.get(t.source) if t.source is not ORIGIN else None
        if source is None:
            return t.left
        size = self.way.file_bytes
        whole_files = (self.way.n_bytes - source.left + NOTHING_LEFT) // size * size
        return max(0.0, whole_files - (self.way.n_bytes - t.left))

    def _begin(self, host: str, source: str | None) -> None:
        self._transfers[host] = _Transfer(host, source, self.way.n_bytes, self.now + self.way.links.latency_s)

    def _rates(self) -> dict[str, float]:
        """Bytes per second of each transfer that has begun and whose source has bytes: links are divided evenly."""
        running = [
            t for t in self._transfers.values() if t.starts_at <= self.now and self._available(t) >= NOTHING_LEFT
        ]
        readers: dict[str | None, int] = defaultdict(int)
        into: dict[str, int] = defaultdict(int)
        for t in running:
            readers[t.source] += 1
            into[t.host.partition("/")[0]] += 1
        links = self.way.links
        rates = {}
        for t in running:
            of_source = links.origin / readers[ORIGIN] if t.source is ORIGIN else links.host / readers[t.source]
            if t.source is ORIGIN:
                of_source = min(of_source, links.reader)
            rates[t.host] = min(of_source, links.host / into[t.host.partition("/")[0]])
        return rates

    def _advance(self) -> None:
        """Jump to the next event: a transfer begins or ends, or a timer."""
        rates = self._rates()
        moving = [t for t in self._transfers.values() if t.host in rates]
        ends = [self.now + min(self._available(t), self._to_next_file(t)) / rates[t.host] for t in moving]
        begins = [t.starts_at for t in self._transfers.values() if t.starts_at > self.now]
        timers = [self._events[0][0]] if self._events else []
        at = min([*ends, *begins, *timers])
        for t in moving:
            t.left -= rates[t.host] * (at - self.now)
        self.now = at
        done = [t.host for t in self._transfers.values() if t.left < NOTHING_LEFT]
        for host in done:
            del self._transfers[host]
            self._arrived(host)
        if done and self.way.prepared:
            self._fetch()
        while self._events and self._events[0][0] <= self.now:
            heapq.heappop(self._events)[2]()

    def _to_next_file(self, t: _Transfer) -> float:
        """Bytes until a host has one more file to pass on."""
        if not self.way.relays:
            return t.left
        done = self.way.n_bytes - t.left
        return min(t.left, self.way.file_bytes - (done + NOTHING_LEFT) % self.way.file_bytes + NOTHING_LEFT)

    def _after(self, seconds: float, call: Callable[[], None]) -> None:
        self._order += 1
        heapq.heappush(self._events, (self.now + seconds, self._order, call))

    def _arrived(self, name: str) -> None:
        """A host has the version; or, where engines read while they are paused, an engine has."""
        if not self.way.prepared:
            self._after(self.way.swap_s, lambda: self._serves(name))
            return
        self._stages[name] = Stage.PRESENT
        self.outcome.all_present_s = self.now
        staged_s = self.engines * self.way.whole_bytes / self.way.stage_bps  # a host's engines stage side by side
        self._after(staged_s, lambda: self._staged(name))

    def _staged(self, host: str) -> None:
        for n in range(self.engines):
            self._set(f"{host}/e{n}", need=Need.NOW, prepared=True)
        self._swap()

    # -- swapping --------------------------------------------------------------------------------------------------

    def _set(self, url: str, **changes: object) -> None:
        known = self._candidates[url]
        values = {name: getattr(known, name) for name in known.__slots__} | changes
        self._candidates[url] = Candidate(**values)  # type: ignore[arg-type]

    def _swap(self) -> None:
        chosen = next_wave(self._candidates.values(), serving_share=self.way.serving_share, parallel=self.way.parallel)
        for url in chosen:
            self._set(url, changing=True)
            self._paused_at[url] = self.now
            if self.way.prepared:
                self._after(self.way.swap_s, lambda url=url: self._serves(url))  # type: ignore[misc]
            else:
                self._begin(url, ORIGIN)
        paused = len(self._paused_at)
        self.outcome.least_serving = min(self.outcome.least_serving, 1 - paused / len(self._candidates))

    def _serves(self, url: str) -> None:
        self._set(url, changing=False, need=Need.NOTHING, current=True)
        self.outcome.stall_s = max(self.outcome.stall_s, self.now - self._paused_at.pop(url))
        self.outcome.all_serve_s = self.now
        self._swap()
