"""Lets engines prepare a version while they serve another one: fetch it, verify it, and keep it beside the one in use.

    absent ─ its host is given a source (fan_out) ─► fetching ─► staging ─► ready: it may swap
       ▲                                               └───────────┴─► failed ─ another source, at most TRIES times ─┐
       └──────────────────────────────────────────────────────────────────────────────────────────────────────────────┘

Preparing changes nothing that serves, so it needs no claim, and any replica may ask for it again. An engine that cannot
prepare, or fails to, loads the version from a folder while it is paused.

The engines of a host share a cache, so the host is what the tree of sources is planned for. Other hosts read from a
host as soon as it has files of the version.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

from agentrl.configs.publish_config import PublishConfig
from agentrl.domain.schemas import Json
from agentrl.engine.control.preparation import Order, Preparation, PreparationState
from agentrl.errors import CannotPrepare, EngineError
from agentrl.proxy.engines.delivery.version_places import VersionPlaces, until
from agentrl.proxy.engines.engine_state import Engine, EngineState
from agentrl.proxy.engines.fan_out import ORIGIN, Copy, Stage, next_fetches
from agentrl.proxy.engines.tensor_transfer import compare
from agentrl.proxy.engines.version_delivery import EngineBusy, Prepared, RecordedFolder, Source
from agentrl.versions.weights_folder import version_of

log = logging.getLogger(__name__)
FIRST_POLL_S, LONGEST_POLL_S, POLL_GROWTH = 0.02, 0.5, 1.5
TRIES = 3
"""Sources from which a host tries to read a version."""
PEERS = 2
"""Engines that one which prepares a version alone may read it from."""
UNDER_WAY = (PreparationState.FETCHING, PreparationState.STAGING)
Ready = Callable[[Engine, Prepared | None], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """A version that engines should prepare. With `digests`, their tensors are compared with these."""

    version: int
    folder: Path
    checksum: str
    digests: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The version folder's name."""
        return self.folder.name


class Preparations:
    """Asks engines to prepare versions. `timeout_s` bounds each preparation."""

    def __init__(self, places: VersionPlaces, *, fan_out: int, parallel: int, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._places = places
        self._fan_out = fan_out
        self._parallel = parallel

    @classmethod
    def of(cls, config: PublishConfig, places: VersionPlaces) -> Self | None:
        """The preparations of a run; None where engines should not prepare versions."""
        if not config.prepare:
            return None
        return cls(places, fan_out=config.fan_out, parallel=config.parallel, timeout_s=config.update_timeout_s)

    def wish(self, version: int, recorded: RecordedFolder, digests: dict[str, str]) -> Wish | None:
        """A version to prepare; None for one without files that engines could prepare."""
        if recorded.path is None or recorded.checksum is None:
            return None
        folder = Path(recorded.path)
        if version_of(folder.name) != version or not self._places.may_have(folder):
            return None
        return Wish(version=version, folder=folder, checksum=recorded.checksum, digests=digests)

    async def spread(self, engines: Sequence[Engine], wish: Wish, ready: Ready) -> None:
        """Let engines prepare a version. Calls `ready` once for each: with None for one that has to load it instead."""
        origins = self._parallel if self._places.serves_many else self._fan_out
        await _Spread(self, engines, wish, ready, fan_out=self._fan_out, origins=origins).run()

    async def advance(self, engine: Engine, wish: Wish, peers: Iterable[Engine]) -> Prepared | None:
        """Begin or follow the preparation of one engine. None when it has to load the version instead.

        Raises EngineBusy while it prepares this version, or a newer one, and while one that is ready waits for its
        publish, each for at most `timeout_s`: the publish may have been abandoned. Raises EngineError.
        """
        if engine.prepares is False:
            return None
        found = await engine.client.preparation()
        engine.prepares = found is not None
        if found is None:
            return None
        now = time.monotonic()
        if found.version is not None and found.version > wish.version and self._is_awaited(engine, found, now):
            raise EngineBusy(f"{engine.url} prepares version {found.version}")
        engine.newer = None
        if (found.name, found.checksum) != (wish.name, wish.checksum) or found.state is PreparationState.NONE:
            engine.preparing_since = now
            found = await self.order(engine, wish, list(peers)[:PEERS])
        since = engine.preparing_since = engine.preparing_since or now
        if found.state in UNDER_WAY and now - since < self.timeout_s:
            raise EngineBusy(f"{engine.url} prepares version {wish.version}")
        engine.preparing_since = None
        if not found.is_ready(wish.name):
            log.warning("engine %s loads version %d: %s", engine.url, wish.version, _problem(found, wish))
            return None
        return await prepared_of(engine, wish, found, now - since, "peer")

    def _is_awaited(self, engine: Engine, found: Preparation, now: float) -> bool:
        """Whether a version that an engine prepares, or has just prepared, will probably be swapped in."""
        is_ready = found.state is PreparationState.READY
        if found.name is None or not (is_ready or found.state in UNDER_WAY):
            return False
        if engine.newer is None or engine.newer[:2] != (found.name, is_ready):
            engine.newer = (found.name, is_ready, now)
        return now - engine.newer[2] < self.timeout_s

    async def order(self, engine: Engine, wish: Wish, peers: Iterable[Engine]) -> Preparation:
        """Ask an engine to prepare a version. Raises EngineError."""
        serving = [source for peer in peers if (source := _source(peer, wish.name)) is not None]
        order = Order(
            version=wish.version,
            name=wish.name,
            checksum=wish.checksum,
            sources=self._places.sources(wish.folder, engine.url, serving),
            digests=bool(wish.digests),
        )
        return await engine.client.prepare(order)


class _Spread:
    """One version on its way to the hosts of some engines."""

    def __init__(
        self,
        preparations: Preparations,
        engines: Sequence[Engine],
        wish: Wish,
        ready: Ready,
        *,
        fan_out: int,
        origins: int,
    ) -> None:
        self._preparations = preparations
        self._wish = wish
        self._ready = ready
        self._fan_out, self._origins = fan_out, origins
        self._engines: dict[str, list[Engine]] = {}  # by host; of those that are not ready
        self._tries: dict[str, int] = {}
        self._serves: dict[str, Engine] = {}  # host → the engine from which others read
        for engine in engines:
            self._engines.setdefault(host_of(engine), []).append(engine)
        self._copies = {host: Copy(host=host, stage=Stage.ABSENT) for host in self._engines}
        self._deadline = 0.0
        self._changed = asyncio.Event()

    async def run(self) -> None:
        """Return when every engine is ready, or has to load the version."""
        self._deadline = time.monotonic() + self._preparations.timeout_s
        async with asyncio.TaskGroup() as group:
            while self._engines:
                self._changed.clear()
                for host, source in self._begin().items():
                    group.create_task(self._fetch(host, source))
                if self._engines:
                    await self._changed.wait()

    def _begin(self) -> dict[str, str | None]:
        """The hosts that fetch now, with their sources. If none is left for the others, their engines load."""
        fetches = next_fetches(self._copies.values(), fan_out=self._fan_out, origins=self._origins)
        for host, source in fetches.items():
            self._copies[host] = replace(self._copies[host], stage=Stage.FETCHING, source=source)
        if not any(copy.stage is Stage.FETCHING for copy in self._copies.values()):
            for host in [copy.host for copy in self._copies.values() if copy.stage is Stage.ABSENT]:
                self._give_up(host)
        return fetches

    async def _fetch(self, host: str, source: str | None) -> None:
        """Let the engines of a host prepare the version, from one source."""
        await asyncio.gather(*(self._prepare(engine, host, source) for engine in self._engines[host]))
        copy = self._copies[host]
        if copy.stage is Stage.FETCHING:  # none of them has it
            self._tries[host] = self._tries.get(host, 0) + 1
            self._copies[host] = replace(
                copy, stage=Stage.ABSENT, source=ORIGIN, avoids=copy.avoids | {source}, relays=False
            )
        if copy.stage is Stage.PRESENT or self._tries[host] >= TRIES or self._is_late():
            self._give_up(host)
        self._changed.set()

    def _give_up(self, host: str) -> None:
        """The engines of a host that are not ready load the version."""
        if self._copies[host].stage is not Stage.PRESENT:
            del self._copies[host]
        for engine in self._engines.pop(host, []):
            self._ready(engine, None)

    def _is_late(self) -> bool:
        return time.monotonic() >= self._deadline

    async def _prepare(self, engine: Engine, host: str, source: str | None) -> None:
        """Let one engine prepare the version; it leaves the engines that are not ready when it is."""
        started = time.monotonic()
        try:
            if self._serves_it(engine):
                self._arrived(engine, host, reads=True)
                self._done(engine, host, None)
                return
            if engine.prepares is False:
                return
            found = await self._preparations.order(engine, self._wish, self._peers(source))
            engine.prepares = True
            found = await self._followed(engine, host, found)
            if not found.is_ready(self._wish.name):
                log.warning(
                    "engine %s did not prepare version %d: %s",
                    engine.url,
                    self._wish.version,
                    _problem(found, self._wish),
                )
                return
            by: Source = "origin" if source is ORIGIN else "peer"
            prepared = await prepared_of(engine, self._wish, found, time.monotonic() - started, by)
        except CannotPrepare:
            engine.prepares = False
        except EngineError as error:
            log.warning("engine %s did not prepare version %d: %s", engine.url, self._wish.version, error)
        else:
            self._done(engine, host, prepared)

    def _serves_it(self, engine: Engine) -> bool:
        """Whether an engine has the version: another replica publishes it too, or began to."""
        return engine.state is EngineState.SERVING and engine.version == self._wish.version

    def _done(self, engine: Engine, host: str, prepared: Prepared | None) -> None:
        self._engines[host].remove(engine)
        self._ready(engine, prepared)

    async def _followed(self, engine: Engine, host: str, found: Preparation) -> Preparation:
        """Ask until the preparation has ended, is replaced, or its time is over. Raises EngineError."""
        pause_s = FIRST_POLL_S
        while found.name == self._wish.name and found.state in UNDER_WAY and not self._is_late():
            if found.state is PreparationState.STAGING:
                self._arrived(engine, host, reads=found.bytes > 0)
            elif found.bytes:
                self._relays(engine, host, found)
            await asyncio.sleep(pause_s)
            pause_s = min(POLL_GROWTH * pause_s, LONGEST_POLL_S)
            found = await engine.client.preparation() or Preparation()
        if found.is_ready(self._wish.name):
            self._arrived(engine, host, reads=found.bytes > 0)
        return found

    def _relays(self, engine: Engine, host: str, found: Preparation) -> None:
        """A host reads the version's files: it passes on those that it has."""
        copy = self._copies[host]
        if copy.serves or not found.serves_versions or _source(engine, self._wish.name) is None:
            return
        self._serves[host] = engine
        self._copies[host] = replace(copy, relays=True)
        self._changed.set()

    def _arrived(self, engine: Engine, host: str, *, reads: bool) -> None:
        """A host has the version's files: others may read them there. `reads`: it has read them from a source."""
        copy = self._copies[host]
        if copy.stage is Stage.PRESENT:
            return
        self._serves.setdefault(host, engine)
        self._copies[host] = replace(copy, stage=Stage.PRESENT, source=ORIGIN)
        if not reads:  # it uses a folder in place, as the others will
            self._origins = max(self._origins, len(self._copies))
        self._changed.set()

    def _peers(self, source: str | None) -> list[Engine]:
        return [self._serves[source]] if source is not None and source in self._serves else []


async def prepared_of(engine: Engine, wish: Wish, found: Preparation, seconds: float, by: Source) -> Prepared:
    """The facts of a preparation that is ready. Raises EngineError when its tensors are not the trainer's."""
    verified = 0
    if wish.digests:
        verified = compare(engine.url, await engine.client.prepared_digests(wish.name), wish.digests)
    return Prepared(wish.name, found.bytes, seconds, by if found.bytes else "host", verified)


def _source(engine: Engine, name: str) -> Json | None:
    """How other hosts read a version, and those that a chain of deltas needs, from an engine's host."""
    return engine.client.version_source(name, until())


def host_of(engine: Engine) -> str:
    """The host of an engine, whose engines share a cache of versions."""
    return urlsplit(engine.url).hostname or engine.url


def _problem(found: Preparation, wish: Wish) -> str:
    if found.name != wish.name:
        return f"it prepares {found.name} now"
    return found.error or f"it is {found.state.value} after publish.update_timeout_s"
