"""The engines behind the proxy: which of them serve, which one a session uses, and how one comes (back) in.

An engine serves only while it answers and reports the run's current version, or the one that a replica is publishing.
One that restarted (base weights) or missed a publish is brought to the current version first. Paused is not dead: it
holds its calls, and gets new ones only when no other engine serves.

Only the replica that has taken an engine, in the store, changes its weights. It stays paused until they are whole. Who
leaves it before that, or dies, leaves it for others to repair.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from agentrl.engine.client import BASE, Adapter, EngineClient, PauseMode
from agentrl.errors import EngineError, EngineUnavailable, StoreError
from agentrl.proxy.adapters import Adapters
from agentrl.proxy.recent import Recent
from agentrl.proxy.retry_budget import RetryBudget
from agentrl.proxy.transfer import Transfer, close_open_update, verify

log = logging.getLogger(__name__)
WATCH_EVERY_S = 1.0
LOOK_AGAIN_S = 0.2
"""The same for one that another replica updates."""
PROBE_TIMEOUT_S = 5.0
HANGS_AFTER = 3
"""Probes in a row without an answer, until an engine that still takes connections counts as dead."""
CLEANING_UP_S = 60.0
"""What an update that was not over in time may still take to close what it leaves: so much longer it has the engine."""
GIVE_BACK_TIMEOUT_S = 10.0


class EngineBusy(EngineError):
    """The engine holds calls back, and it is another's turn to do something about it."""


class EngineState(StrEnum):
    """What the pool believes of an engine; the same words as in the store."""

    SERVING = "serving"
    UPDATING = "updating"  # alive, holds its calls back
    DEAD = "dead"


@dataclass(frozen=True, slots=True)
class Delivery:
    """How a version comes from its trainer: if not by a transfer, from its folder."""

    transfer: Transfer | None = None
    digests: dict[str, str] = field(default_factory=dict)  # of its tensors, by the engines' names
    n_bytes: int | None = None


BY_FOLDER = Delivery()


@dataclass(frozen=True, slots=True)
class Loaded:
    """What loading a version took."""

    stall_s: float  # that the engine stood still
    transport: str
    verified: int = 0  # tensors that were compared with the trainer's


@dataclass(slots=True)
class Engine:
    """One engine of the pool."""

    client: EngineClient
    state: EngineState = EngineState.DEAD
    version: int | None = None
    label: int | None = None  # of its whole weights, as it reports them
    adapter: Adapter | None = None  # what makes base weights that version
    loaded: dict[str, str] = field(default_factory=dict)  # adapters that it has: name → folder
    folder: str | None = None  # that the run's adapters are in
    replaced_at: dict[str, float] = field(default_factory=dict)  # adapters that new calls no longer get, since when
    running: int = 0  # calls of ours
    draining: bool = False  # finishes what it has
    error: str | None = None
    last_seen_at: float = 0.0
    holds: bool = False  # it is paused: calls that it gets now wait
    kept: bool = False  # it could not be given back
    paused_since: float | None = None  # monotonic; None: not paused
    reported: bool = False  # the store knows of its state and version
    unanswered: int = 0  # probes in a row
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)  # held by who asks it or changes its weights
    look: asyncio.Event = field(default_factory=asyncio.Event)  # probe it now

    @property
    def url(self) -> str:
        """Where it listens."""
        return self.client.url


@dataclass(slots=True)
class Turn:
    """A replica's turn at an engine."""

    mine: bool  # nobody else changes its weights meanwhile
    whole: bool  # they are of one version; else the engine stays paused


class Records(Protocol):
    """What the pool asks and tells the store. All may raise StoreError, which stops neither the watch nor an update."""

    async def wanted(self, reported: int | None) -> int:
        """The version that an engine should serve which reports `reported`; any replica may publish."""

    async def folder(self, version: int) -> str:
        """Where a version's tensors are."""

    async def save(self, engine: Engine) -> None:
        """Record an engine's state."""

    async def take(self, url: str, seconds: float) -> str | None:
        """Let no other replica change an engine's weights, for so long; else who does so now."""

    async def give_back(self, url: str, *, whole: bool) -> None:
        """Others may, and have to if its weights are not `whole`."""

    async def is_whole(self, url: str) -> bool:
        """Whether no replica, this one too, changes its weights or has left them in the middle."""

    async def drained(self) -> set[str]:
        """The engines that take no calls."""

    async def undone(self, version: int) -> bool:
        """Whether a version newer than this one was rolled back."""


class EnginePool:
    """Sticky, least-loaded choice among serving engines, and the watch that keeps the list true.

    With `adapters`, versions are adapters over base weights.
    """

    def __init__(
        self, clients: list[EngineClient], records: Records, *, adapters: Adapters | None = None,
        pause_mode: PauseMode = "retract", update_timeout_s: float = 180.0,
    ) -> None:  # fmt: skip
        self.pause_mode = pause_mode
        self.engines = [Engine(client) for client in clients]
        self.update_lock = asyncio.Lock()  # one publisher at a time
        self.budget = RetryBudget()
        self.calls = 0  # under way
        self._records = records
        self._adapters = adapters
        self._update_timeout_s = update_timeout_s
        self.keeps_cache = pause_mode == "in_place" and adapters is None  # of old weights, when new ones come
        self._sticky: Recent[Engine] = Recent()
        self._deaths: Recent[int] = Recent()  # of engines, by the call that they were sampling
        self._news = asyncio.Event()
        self._segments = 0

    # -- the watch -------------------------------------------------------------------------------------------------

    async def watch(self) -> None:
        """Probe every engine, for ever, each at its own pace; this is the pool's only background work."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow_drains())
            for engine in self.engines:
                group.create_task(self._follow(engine))

    async def _follow(self, engine: Engine) -> None:
        while True:
            engine.look.clear()
            if not engine.lock.locked():
                try:
                    await self.probe(engine)
                except StoreError as error:
                    log.error("engine %s: %s; probing again", engine.url, error)
            try:
                async with asyncio.timeout(LOOK_AGAIN_S if engine.state is EngineState.UPDATING else WATCH_EVERY_S):
                    await engine.look.wait()
            except TimeoutError:
                continue

    async def _follow_drains(self) -> None:
        while True:
            try:
                await self.read_drains()
            except StoreError as error:
                log.error("which engines are drained could not be read: %s", error)
            await asyncio.sleep(WATCH_EVERY_S)

    async def read_drains(self) -> None:
        """Learn which engines take no calls. Raises StoreError."""
        drained = await self._records.drained()
        for engine in self.engines:
            engine.draining = engine.url in drained
        self._tell()

    async def probe(self, engine: Engine) -> None:
        """Ask an engine for its version; bring it to the one that it should serve. Raises StoreError."""
        async with engine.lock:
            try:
                await self._bring(engine)
                if self._adapters is not None:
                    await self._adapters.retire(engine)
            except TimeoutError:
                await self._no_answer(engine)
            except EngineBusy:
                await self.set_state(engine, EngineState.UPDATING)
            except EngineError as error:
                if isinstance(error, EngineUnavailable):
                    engine.client.hang_up()
                await self.set_state(engine, EngineState.DEAD, error=str(error))

    async def _ask(self, engine: Engine) -> tuple[int | None, bool]:
        """The version that an engine reports, and whether it is paused. Raises EngineError, TimeoutError."""
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            label = (await engine.client.model_info()).version
            reported = engine.label = int(label) if label.isdecimal() else None
            if self._adapters is not None:
                reported = await self._adapters.reported(engine, reported)
            engine.holds = await engine.client.paused()
        engine.last_seen_at = time.time()
        engine.unanswered = 0
        if not engine.holds:
            engine.paused_since = None
        return reported, engine.holds

    async def _bring(self, engine: Engine) -> None:
        """Let an engine serve, once it has the version that it should. Raises EngineError, TimeoutError, StoreError.

        Until then `engine.version` stays what it was, by which calls notice that the engine has restarted.
        """
        reported, paused = await self._ask(engine)
        if paused and not await self._was_left(engine):
            engine.holds = False  # if it starts, it would sample what it gets
            raise EngineBusy(f"{engine.url} is starting, or was paused by hand")
        wanted = await self._records.wanted(reported)
        while paused or reported != wanted:
            await self._records.folder(wanted)  # which may be read for long: before anybody has to wait
            async with self._turn(engine, paused) as turn:
                reported, paused = await self._ask(engine)  # another replica may have brought it there just now
                turn.whole = not paused
                wanted = await self._records.wanted(reported)
                if paused or reported != wanted:
                    await self._put(engine, turn, wanted)
                    reported, paused = wanted, False
            wanted = await self._records.wanted(reported)  # the run may have moved on meanwhile
        engine.version = wanted
        await self.set_state(engine, EngineState.SERVING)
        if engine.kept:
            await self._give_back(engine, whole=True)

    @asynccontextmanager
    async def _turn(self, engine: Engine, paused: bool, patience_s: float = 0.0) -> AsyncIterator[Turn]:
        """Let no other replica change the engine's weights while the block runs; the engine's lock is held.

        Where only an adapter is loaded there is nothing to exclude. Raises EngineBusy when another replica has its turn
        for longer than `patience_s`, EngineUnavailable when the block takes too long, StoreError.
        """
        if self._adapters is not None and engine.label == BASE and not paused:
            yield Turn(mine=False, whole=True)
            return
        until = time.monotonic() + patience_s
        while True:
            deadline = asyncio.get_running_loop().time() + self._update_timeout_s
            holder = await self._records.take(engine.url, self._update_timeout_s + CLEANING_UP_S)
            if holder is None:
                break
            if time.monotonic() >= until:
                raise EngineBusy(f"{engine.url} is updated by {holder}")
            await asyncio.sleep(LOOK_AGAIN_S)
        turn = Turn(mine=True, whole=not paused)
        try:
            async with asyncio.timeout_at(deadline) as limit:
                yield turn
        except (EngineError, TimeoutError) as error:
            if not turn.whole:
                await self._leave_paused(engine)
            if limit.expired():
                said = f"{engine.url} was not updated in {self._update_timeout_s:g} s (publish.update_timeout_s)"
                raise EngineUnavailable(said) from error
            raise
        finally:
            await self._give_back(engine, whole=turn.whole)

    async def _leave_paused(self, engine: Engine) -> None:
        """Its weights may be anything: it stays paused until a replica has repaired it.

        What it holds is aborted, as only a retracted request is at once, and goes on elsewhere.
        """
        with suppress(EngineError, TimeoutError):  # it is gone, and what it held with it
            async with asyncio.timeout(CLEANING_UP_S / 2):
                await engine.client.pause("retract")
                await engine.client.abort_all()

    async def _give_back(self, engine: Engine, *, whole: bool) -> None:
        """If the store cannot be told, others wait until our time is over, or until we have told it."""
        engine.kept = True
        try:
            async with asyncio.timeout(GIVE_BACK_TIMEOUT_S):
                await self._records.give_back(engine.url, whole=whole)
        except (StoreError, TimeoutError) as error:
            log.error("engine %s could not be given back: %s", engine.url, error or "no answer in time")
        else:
            engine.kept = False

    async def _was_left(self, engine: Engine) -> bool:
        """Whether a paused engine was paused by a replica, which may still be at it, or by nobody for too long."""
        engine.paused_since = engine.paused_since or time.monotonic()
        too_long = time.monotonic() - engine.paused_since > self._update_timeout_s + CLEANING_UP_S
        return too_long or not await self._records.is_whole(engine.url)

    async def _no_answer(self, engine: Engine) -> None:
        """A busy engine may be slow to answer; one that stays silent hangs, and so do its calls."""
        engine.unanswered += 1
        if engine.unanswered >= HANGS_AFTER or engine.state is EngineState.DEAD:
            engine.client.hang_up()
            await self.set_state(engine, EngineState.DEAD, error="no answer in time")

    async def load(self, engine: Engine, version: int, delivery: Delivery = BY_FOLDER) -> Loaded:
        """Put `version` on an engine that answers, unless it has it, and let it serve.

        Raises EngineError when it does not answer, or does not report the version afterwards, or has other tensors than
        the trainer, and StoreError.
        """
        async with engine.lock:
            _, paused = await self._answer(engine)
            await self._records.folder(version)
            async with self._turn(engine, paused, self._update_timeout_s + CLEANING_UP_S) as turn:
                reported, paused = await self._answer(engine)
                turn.whole = not paused
                if reported == version and not paused:  # a publish that was asked for twice
                    engine.version, loaded = version, Loaded(0.0, "none")
                else:
                    loaded = await self._put(engine, turn, version, delivery)
                await self.set_state(engine, EngineState.SERVING)
            return loaded

    async def _answer(self, engine: Engine) -> tuple[int | None, bool]:
        """As `_ask`. Raises EngineError."""
        try:
            return await self._ask(engine)
        except TimeoutError as error:
            raise EngineUnavailable(f"{engine.url} does not answer") from error

    async def _put(self, engine: Engine, turn: Turn, version: int, delivery: Delivery = BY_FOLDER) -> Loaded:
        """Have an engine that answers serve `version`."""
        started = time.monotonic()
        if self._adapters is None:
            return await self._replace(engine, turn, version, delivery)
        path = await self._records.folder(version)
        if engine.label != BASE or not turn.whole:
            await self._replace(engine, turn, BASE)
        await self._adapters.put(engine, version, path)
        return Loaded(time.monotonic() - started, "adapter")

    async def _replace(self, engine: Engine, turn: Turn, version: int, delivery: Delivery = BY_FOLDER) -> Loaded:
        """Pause, update, check, continue."""
        if not turn.mine:
            raise EngineBusy(f"{engine.url} has changed")  # since it was asked: it is asked again
        path = await self._records.folder(version)
        await self.set_state(engine, EngineState.UPDATING)
        started = time.monotonic()
        was_left, turn.whole = not turn.whole, False
        # going back, newer weights may have had a part in what is cached for the older version
        goes_on = not was_left and engine.label is not None and engine.label < version
        keeps_cache = self.keeps_cache and goes_on
        mode: PauseMode = "retract" if self.pause_mode == "in_place" and not keeps_cache else self.pause_mode
        await engine.client.pause(mode)
        engine.holds = True
        self._tell()
        if was_left:
            await close_open_update(engine.client)
        transport, verified = await self._fill(engine.client, version, path, delivery, flush=not keeps_cache)
        await engine.client.continue_generation()
        turn.whole = True
        engine.version = engine.label = version
        engine.adapter, engine.holds = None, False
        return Loaded(time.monotonic() - started, transport, verified)

    async def _fill(
        self, client: EngineClient, version: int, path: str, delivery: Delivery, *, flush: bool
    ) -> tuple[str, int]:
        """Update a paused engine: by the delivery's transfer if it can, else from the folder. Raises EngineError.

        Returns how, and how many tensors were compared with the trainer's. A `flush` of the cache is refused while
        requests hold their places in it.
        """
        transfer = delivery.transfer
        if transfer is not None and transfer.reaches(client.url):
            try:
                await transfer.load(client, version, flush_cache=flush)
                return transfer.transport, await self._check(client, version, delivery)
            except EngineError as error:
                log.warning("engine %s reads version %d from its folder: %s", client.url, version, error)
                await close_open_update(client)
        await client.update_weights_from_disk(path, version, flush_cache=flush, timeout_s=self._update_timeout_s)
        return "disk", await self._check(client, version, delivery)

    async def _check(self, client: EngineClient, version: int, delivery: Delivery) -> int:
        reported = (await client.model_info()).version
        if reported != str(version):
            raise EngineError(f"{client.url} reports version {reported!r} after an update to {version}")
        return await verify(client, delivery.digests)

    # -- the choice ------------------------------------------------------------------------------------------------

    async def acquire(self, session_id: str, deadline: float) -> Engine:
        """The session's engine, or the least loaded one that serves; waits for one until `deadline` (monotonic).

        Raises EngineUnavailable when none serves in time. Give it back with `release`.
        """
        while (engine := self._choose(session_id)) is None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise EngineUnavailable("no inference engine is serving")
            try:
                async with asyncio.timeout(left):
                    await self._news.wait()
            except TimeoutError:
                continue
        engine.running += 1
        return engine

    def _choose(self, session_id: str) -> Engine | None:
        home = self._sticky.get(session_id)
        if home is not None and home.state is EngineState.SERVING and not home.draining:
            return home
        usable = [e for e in self.engines if e.state is EngineState.SERVING and not e.draining]
        if not usable:  # one that is being updated holds the call, and then samples it
            usable = [e for e in self.engines if e.state is EngineState.UPDATING and e.holds and not e.draining]
        if not usable or home in usable:
            return home if usable else None
        order = hashlib.blake2b(session_id.encode()).digest()[0]
        chosen = min(enumerate(usable), key=lambda at: (at[1].running, (at[0] + order) % len(usable)))[1]
        if home is None or home.draining or home.state is EngineState.DEAD:  # after an update the session comes home
            self._sticky[session_id] = chosen
        return chosen

    def release(self, engine: Engine) -> None:
        """The call that acquired the engine is over."""
        engine.running -= 1

    def forget(self, session_id: str) -> None:
        """The session has ended."""
        self._sticky.pop(session_id, None)

    # -- calls and their failures ----------------------------------------------------------------------------------

    @contextmanager
    def call(self) -> Iterator[None]:
        """While a call is sampled."""
        self.budget.call(time.monotonic())
        self.calls += 1
        try:
            yield
        finally:
            self.calls -= 1

    def segment_id(self, rid: str) -> str:
        """A name for one request to an engine: engines match names by prefix, so all of them have one length."""
        self._segments = (self._segments + 1) & 0xFFFFFFFF
        return f"{rid}-{self._segments:08x}"

    async def failed(self, engine: Engine, rid: str, error: EngineError) -> int:
        """An engine broke off a call: it is dead until it answers a probe, which is due at once.

        Returns how many engines have died under this call.
        """
        await self.set_state(engine, EngineState.DEAD, error=str(error))
        engine.look.set()
        self._deaths[rid] = self._deaths.get(rid, 0) + 1
        return self._deaths[rid]

    async def serves_rightly(self, version: int) -> bool:
        """Whether an engine should be serving `version`. Raises StoreError."""
        return await self._records.wanted(version) == version

    async def never_left(self, version: int) -> bool:
        """Whether an engine that serves `version` now, and did before, has done so all the while. Raises StoreError.

        It could only have come back from a newer version that was rolled back.
        """
        return not await self._records.undone(version)

    async def set_state(self, engine: Engine, state: EngineState, error: str | None = None) -> None:
        """Wake who waits for an engine, and record what became of this one."""
        before, engine.state, engine.error = engine.state, state, error
        engine.holds = engine.holds and state is EngineState.UPDATING
        engine.paused_since = None if state is EngineState.DEAD else engine.paused_since
        if before is not state:
            log.info("engine %s is %s%s", engine.url, state, f": {error}" if error else "")
            engine.reported = False
        self._tell()
        if not engine.reported:
            try:
                await self._records.save(engine)
                engine.reported = True
            except StoreError as problem:  # the next probe tries again
                log.error("engine %s is %s, which could not be recorded: %s", engine.url, state, problem)

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()
