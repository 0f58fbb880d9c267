"""Changing an engine's weights: pause, update, check, continue.

Only the replica that has taken an engine, in the store, changes its weights. It stays paused until they are whole. Who
leaves it before that, or dies, leaves it for others to repair.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Protocol

from agentrl.engine.sglang_client import BASE, EngineClient, PauseMode
from agentrl.errors import EngineError, EngineUnavailable, StoreError
from agentrl.proxy.engines.adapters import Adapters
from agentrl.proxy.engines.engine_state import Engine, EngineState
from agentrl.proxy.engines.tensor_transfer import Transfer, close_open_update, verify

log = logging.getLogger(__name__)
LOOK_AGAIN_S = 0.2
"""How often to look at an engine that another replica updates."""
PROBE_TIMEOUT_S = 5.0
CLEANING_UP_S = 60.0
"""What an update that was not over in time may still take to close what it leaves: so much longer it has the engine."""
GIVE_BACK_TIMEOUT_S = 10.0


class EngineBusy(EngineError):
    """The engine holds calls back, and it is another's turn to do something about it."""


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
class Turn:
    """A replica's turn at an engine."""

    mine: bool  # nobody else changes its weights meanwhile
    whole: bool  # they are of one version; else the engine stays paused


class Records(Protocol):
    """What pool and updates ask and tell the store. All may raise StoreError, which stops neither."""

    async def wanted(self, reported: int | None) -> int:
        """The version that an engine should serve which reports `reported`; any replica may publish."""

    async def folder(self, version: int) -> str | None:
        """Where a version's tensors are. None: engines keep what they have."""

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


class Updates:
    """Brings engines to versions. The lock of an engine is held by the caller.

    `set_state` and `tell` are the pool's: who waits for an engine is woken. With `adapters`, versions are adapters over
    base weights.
    """

    def __init__(
        self,
        records: Records,
        set_state: Callable[[Engine, EngineState], Awaitable[None]],
        tell: Callable[[], None],
        *,
        adapters: Adapters | None,
        pause_mode: PauseMode,
        timeout_s: float,
    ) -> None:
        self.pause_mode = pause_mode
        self.timeout_s = timeout_s
        self.keeps_cache = pause_mode == "in_place" and adapters is None  # of old weights, when new ones come
        self._records = records
        self._set_state = set_state
        self._tell = tell
        self._adapters = adapters

    async def ask(self, engine: Engine) -> tuple[int | None, bool]:
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

    async def bring(self, engine: Engine) -> None:
        """Let an engine serve, once it has the version that it should. Raises EngineError, TimeoutError, StoreError.

        Until then `engine.version` stays what it was, by which calls notice that the engine has restarted.
        """
        reported, paused = await self.ask(engine)
        if paused and not await self._was_left(engine):
            engine.holds = False  # if it starts, it would sample what it gets
            raise EngineBusy(f"{engine.url} is starting, or was paused by hand")
        wanted = await self._records.wanted(None if paused else reported)  # a paused engine's label says nothing
        while paused or reported != wanted:
            await self._records.folder(wanted)  # which may be read for long: before anybody has to wait
            async with self._turn(engine, paused) as turn:
                reported, paused = await self.ask(engine)  # another replica may have brought it there just now
                turn.whole = not paused
                wanted = await self._records.wanted(None if paused else reported)
                if paused or reported != wanted:
                    await self._put(engine, turn, wanted)
                    reported, paused = wanted, False
            wanted = await self._records.wanted(reported)  # the run may have moved on meanwhile
        engine.version = wanted
        await self._set_state(engine, EngineState.SERVING)
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
            deadline = asyncio.get_running_loop().time() + self.timeout_s
            holder = await self._records.take(engine.url, self.timeout_s + CLEANING_UP_S)
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
                said = f"{engine.url} was not updated in {self.timeout_s:g} s (publish.update_timeout_s)"
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
        too_long = time.monotonic() - engine.paused_since > self.timeout_s + CLEANING_UP_S
        return too_long or not await self._records.is_whole(engine.url)

    async def load(self, engine: Engine, version: int, delivery: Delivery = BY_FOLDER) -> Loaded:
        """Put `version` on an engine that answers, unless it has it, and let it serve.

        Raises EngineError when it does not answer, or does not report the version afterwards, or has other tensors than
        the trainer, and StoreError.
        """
        _, paused = await self._answer(engine)
        await self._records.folder(version)
        async with self._turn(engine, paused, self.timeout_s + CLEANING_UP_S) as turn:
            reported, paused = await self._answer(engine)
            turn.whole = not paused
            if reported == version and not paused:  # a publish that was asked for twice
                engine.version, loaded = version, Loaded(0.0, "none")
            else:
                loaded = await self._put(engine, turn, version, delivery)
            await self._set_state(engine, EngineState.SERVING)
        return loaded

    async def _answer(self, engine: Engine) -> tuple[int | None, bool]:
        """As `ask`. Raises EngineError."""
        try:
            return await self.ask(engine)
        except TimeoutError as error:
            raise EngineUnavailable(f"{engine.url} does not answer") from error

    async def _put(self, engine: Engine, turn: Turn, version: int, delivery: Delivery = BY_FOLDER) -> Loaded:
        """Have an engine that answers serve `version`."""
        started = time.monotonic()
        if self._adapters is None:
            return await self._replace(engine, turn, version, delivery)
        path = await self._records.folder(version)
        assert path is not None, "a run with adapters is trained"
        if engine.label != BASE or not turn.whole:
            await self._replace(engine, turn, BASE)
        await self._adapters.put(engine, version, path)
        return Loaded(time.monotonic() - started, "adapter")

    async def _replace(self, engine: Engine, turn: Turn, version: int, delivery: Delivery = BY_FOLDER) -> Loaded:
        """Pause, update, check, continue."""
        if not turn.mine:
            raise EngineBusy(f"{engine.url} has changed")  # since it was asked: it is asked again
        path = await self._records.folder(version)
        await self._set_state(engine, EngineState.UPDATING)
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
        self, client: EngineClient, version: int, path: str | None, delivery: Delivery, *, flush: bool
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
        if path is None:
            await client.label_weights(version)
            return "none", await self._check(client, version, delivery)
        await client.update_weights_from_disk(path, version, flush_cache=flush, timeout_s=self.timeout_s)
        return "disk", await self._check(client, version, delivery)

    async def _check(self, client: EngineClient, version: int, delivery: Delivery) -> int:
        reported = (await client.model_info()).version
        if reported != str(version):
            raise EngineError(f"{client.url} reports version {reported!r} after an update to {version}")
        return await verify(client, delivery.digests)
