"""Updates an engine's weights: pause, update, check, continue.

    prepare ─► claim the engine (store) ─► pause ─► swap or load ─► check the reported version ─► continue ─► release it
                                                   └ failed, or the replica died: stays paused ─► another one repairs it

Only the replica that has claimed it, in the store, changes an engine's weights. The engine stays paused until the
weights are complete ("whole": of one version).

Where trainer and engines take turns on GPUs, the store says whose turn it is, and `bring` obeys:

    claim ─► pause ─► release weights and KV cache ─► release the claim      the trainer's turn
    claim ─► take the memory of the weights ─► load all of them ─► take that of the KV cache ─► check ─► continue
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from agentrl.engine.chunks import BASE, version_of_label
from agentrl.engine.engine_client import Memory, PauseMode
from agentrl.errors import EngineError, EngineUnavailable, StoreError
from agentrl.proxy.engines.adapters import Adapters
from agentrl.proxy.engines.delivery.filling import PREPARED, Filling
from agentrl.proxy.engines.delivery.preparations import Preparations
from agentrl.proxy.engines.engine_records import EngineRecords
from agentrl.proxy.engines.engine_state import Engine, EngineState
from agentrl.proxy.engines.memory_release import release_memory
from agentrl.proxy.engines.tensor_transfer import close_open_update, verify
from agentrl.proxy.engines.version_delivery import BY_FOLDER, Delivery, EngineBusy, Loaded, Prepared

log = logging.getLogger(__name__)
POLL_S = 0.2
"""How often to ask about an engine that another replica updates."""
PROBE_TIMEOUT_S = 5.0
CLEANING_UP_S = 60.0
"""Time for cleaning up after an update that exceeded its limit. A claim is longer than the limit by this."""
RELEASE_TIMEOUT_S = 10.0


@dataclass(slots=True)
class Claim:
    """A replica's claim to change an engine's weights."""

    mine: bool  # this replica has the claim
    whole: bool  # the weights are of one version; else the engine stays paused


class Updates:
    """Brings engines to versions. The caller holds the engine's lock.

    `set_state` and `notify` are the pool's: they wake the calls that wait for an engine. With `adapters`, versions are
    adapters over the base weights.
    """

    def __init__(
        self,
        records: EngineRecords,
        set_state: Callable[[Engine, EngineState], Awaitable[None]],
        notify: Callable[[], None],
        *,
        adapters: Adapters | None,
        pause_mode: PauseMode,
        timeout_s: float,
        preparations: Preparations | None = None,
        peers: Callable[[Engine], list[Engine]] = lambda engine: [],
    ) -> None:
        self.pause_mode = pause_mode
        self.timeout_s = timeout_s
        self.keeps_cache = pause_mode == "in_place" and adapters is None  # caches of old weights survive an update
        self._records = records
        self._set_state = set_state
        self._notify = notify
        self._adapters = adapters
        self._preparations = preparations
        self._filling = Filling(records.base_for, timeout_s)
        self._peers = peers  # the engines that may have the run's version on their hosts

    async def ask(self, engine: Engine) -> tuple[int | None, bool]:
        """The version that an engine reports, and whether it is paused. Raises EngineError, TimeoutError."""
        engine.seen = engine.changes
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            info = await engine.client.model_info()
            engine.memory = info.memory
            reported = engine.label = version_of_label(info.version)
            if self._adapters is not None:
                reported = await self._adapters.reported(engine, reported)
            engine.paused = await engine.client.paused()
        engine.unanswered, engine.unreached = 0, False
        if not engine.paused:
            engine.paused_since = None
        return reported, engine.paused

    async def bring(self, engine: Engine) -> None:
        """Update an engine to the version that it should serve, and let it serve; or release its memory.

        Until then `engine.version` keeps its old value, by which calls notice that the engine has restarted.
        Raises EngineError, TimeoutError, StoreError.
        """
        reported, paused = await self.ask(engine)
        if paused and engine.memory is Memory.HELD and not await self._needs_repair(engine):
            engine.paused = False  # a starting engine would sample the calls that it gets
            raise EngineBusy(f"{engine.url} is starting, or was paused by hand")
        wanted = await self._records.wanted(None if paused else reported)  # a paused engine's label says nothing
        while wanted.released or paused or reported != wanted.version:
            if wanted.released:
                return await self._release_memory(engine, paused)
            prepared = None if paused else await self._prepared(engine, wanted.version)
            if prepared is None:  # checks the folder, which may take long, before the engine is paused
                await self._records.folder(wanted.version)
            async with self._claimed(engine, paused) as claim:
                reported, paused = await self.ask(engine)  # another replica may have just updated it
                claim.whole = not paused
                wanted = await self._records.wanted(None if paused else reported)
                if not wanted.released and (paused or reported != wanted.version):
                    await self._put(engine, claim, wanted.version, prepared=prepared)
                    reported, paused = wanted.version, False
                claim.whole = claim.whole or engine.is_released
            wanted = await self._records.wanted(reported)  # the run may have moved on meanwhile
        engine.version = wanted.version
        await self._set_state(engine, EngineState.SERVING)
        if engine.unreleased:
            await self._release(engine, whole=True)

    async def _prepared(self, engine: Engine, version: int) -> Prepared | None:
        """The version that an engine which serves another one has prepared; None when it has to load it instead.

        Raises EngineBusy while it prepares, EngineError, StoreError.
        """
        if self._preparations is None or self._adapters is not None or engine.memory is not Memory.HELD:
            return None
        wish = self._preparations.wish(version, await self._records.recorded(version), {})
        if wish is None:
            return None
        return await self._preparations.advance(engine, wish, self._peers(engine))

    async def _release_memory(self, engine: Engine, paused: bool) -> None:
        """Release the memory of an engine, whose calls wait in it or at the proxy. Raises EngineError, StoreError."""
        if not engine.is_released:
            async with self._claimed(engine, paused, exclusive=True) as claim:
                _, paused = await self.ask(engine)
                claim.whole = not paused
                if (await self._records.wanted(None)).released and not engine.is_released:
                    await self._set_state(engine, EngineState.UPDATING)
                    claim.whole = False
                    try:
                        await release_memory(engine, self.pause_mode, was_paused=paused)
                    except EngineBusy:
                        claim.whole = not paused
                        raise
                claim.whole = claim.whole or engine.is_released
        if engine.is_released:
            await self._set_state(engine, EngineState.RELEASED)

    @asynccontextmanager
    async def _claimed(
        self, engine: Engine, paused: bool, patience_s: float = 0.0, *, exclusive: bool = False
    ) -> AsyncIterator[Claim]:
        """Exclude other replicas from changing the engine's weights while the block runs.

        If only an adapter is loaded there is nothing to exclude, unless `exclusive`. Raises EngineBusy when another
        replica holds its claim for longer than `patience_s`, EngineUnavailable when the block takes too long,
        StoreError.
        """
        if self._adapters is not None and engine.label == BASE and not paused and not exclusive:
            yield Claim(mine=False, whole=True)
            return
        until = time.monotonic() + patience_s
        while True:
            deadline = asyncio.get_running_loop().time() + self.timeout_s
            holder = await self._records.claim(engine, self.timeout_s + CLEANING_UP_S)
            if holder is None:
                break
            if time.monotonic() >= until:
                raise EngineBusy(f"{engine.url} is updated by {holder}")
            await asyncio.sleep(POLL_S)
        claim = Claim(mine=True, whole=not paused)
        try:
            async with asyncio.timeout_at(deadline) as limit:
                yield claim
        except (EngineError, TimeoutError) as error:
            if not claim.whole:
                await self._leave_paused(engine)
            if limit.expired():
                said = f"{engine.url} was not updated in {self.timeout_s:g} s (publish.update_timeout_s)"
                raise EngineUnavailable(said) from error
            raise
        finally:
            await self._release(engine, whole=claim.whole)

    async def _leave_paused(self, engine: Engine) -> None:
        """Leave an engine with undefined weights paused until a replica has repaired it.

        Its requests are retracted, so that they can be aborted at once, and continue on other engines.
        """
        with suppress(EngineError, TimeoutError):  # the engine is gone, and its requests with it
            async with asyncio.timeout(CLEANING_UP_S / 2):
                await engine.client.pause("retract")
                await engine.client.abort_all()

    async def _release(self, engine: Engine, *, whole: bool) -> None:
        """End our claim. If the store cannot record that, others wait until it expires or a later try succeeds."""
        engine.unreleased = True
        try:
            async with asyncio.timeout(RELEASE_TIMEOUT_S):
                await self._records.release(engine, whole=whole)
        except (StoreError, TimeoutError) as error:
            log.error("the claim on engine %s could not be released: %s", engine.url, error or "no answer in time")
        else:
            engine.unreleased = False

    async def _needs_repair(self, engine: Engine) -> bool:
        """Whether a paused engine may be repaired: a replica paused it for an update, or it is paused for too long."""
        engine.paused_since = engine.paused_since or time.monotonic()
        too_long = time.monotonic() - engine.paused_since > self.timeout_s + CLEANING_UP_S
        return too_long or not await self._records.is_whole(engine.url)

    async def load(
        self,
        engine: Engine,
        version: int,
        delivery: Delivery = BY_FOLDER,
        prepared: Prepared | None = None,
        *,
        forward_only: bool = False,
    ) -> Loaded:
        """Load `version` on an engine that answers and lacks it, then let the engine serve. It may have it `prepared`.

        With `forward_only`, raises EngineBusy for an engine that serves a newer version. Raises EngineError when it
        does not answer, does not report the version afterwards, or has other tensors than the trainer, and StoreError.
        """
        reported, paused = await self._answer(engine)
        if prepared is None and (paused or reported != version):
            await self._records.folder(version, delivery.folder)
        async with self._claimed(engine, paused, self.timeout_s + CLEANING_UP_S) as claim:
            reported, paused = await self._answer(engine)
            claim.whole = not paused
            if forward_only and not paused and reported is not None and reported > version:
                raise EngineBusy(f"{engine.url} serves version {reported}")
            loaded = await self._already(engine, delivery) if reported == version and not paused else None
            if loaded is None:
                loaded = await self._put(engine, claim, version, delivery, prepared)
            engine.version = version
            await self._set_state(engine, EngineState.SERVING)
        return loaded

    async def serves_one_of(self, engine: Engine, versions: set[int]) -> bool:
        """Whether an engine answers, is not paused and reports one of these versions. Raises EngineError."""
        reported, paused = await self._answer(engine)
        if paused or reported not in versions:
            return False
        engine.version = reported
        return True

    async def _already(self, engine: Engine, delivery: Delivery) -> Loaded | None:
        """What to say of an engine that serves the version already: the publish was repeated, or finished by a replica.

        None when its tensors differ from the trainer's: it has to load the version again.
        """
        if self._adapters is not None:
            return Loaded(0.0, "adapter")
        try:
            return Loaded(0.0, "none", await verify(engine.client, delivery.digests))
        except EngineError as error:
            log.warning("engine %s loads the version again: %s", engine.url, error)
            return None

    async def _answer(self, engine: Engine) -> tuple[int | None, bool]:
        """`ask`, with a time-out as EngineUnavailable. Raises EngineError."""
        try:
            return await self.ask(engine)
        except TimeoutError as error:
            raise EngineUnavailable(f"{engine.url} does not answer") from error

    async def _put(
        self,
        engine: Engine,
        claim: Claim,
        version: int,
        delivery: Delivery = BY_FOLDER,
        prepared: Prepared | None = None,
    ) -> Loaded:
        """Load `version`: an adapter over the base weights, or whole weights."""
        started = time.monotonic()
        if self._adapters is None:
            return await self._replace(engine, claim, version, delivery, prepared)
        path = await self._records.folder(version, delivery.folder)
        assert path is not None, "a run with adapters is trained"
        if engine.label != BASE or not claim.whole:
            await self._replace(engine, claim, BASE)
        await self._adapters.put(engine, version, path)
        return Loaded(time.monotonic() - started, "adapter")

    async def _replace(
        self,
        engine: Engine,
        claim: Claim,
        version: int,
        delivery: Delivery = BY_FOLDER,
        prepared: Prepared | None = None,
    ) -> Loaded:
        """Pause, update, check, continue."""
        if not claim.mine:
            raise EngineBusy(f"{engine.url} has changed")  # since `ask`: the next probe asks again
        swaps = prepared is not None and claim.whole and engine.memory is Memory.HELD
        path = None if swaps else await self._records.folder(version, delivery.folder)
        await self._set_state(engine, EngineState.UPDATING)
        started = time.monotonic()
        broken, claim.whole = not claim.whole, False
        # on the way back to an older version, its cache entries may contain parts of newer weights
        moves_forward = not broken and engine.label is not None and engine.label < version
        keeps_cache = self.keeps_cache and moves_forward
        mode: PauseMode = "retract" if self.pause_mode == "in_place" and not keeps_cache else self.pause_mode
        if engine.memory is Memory.HELD:
            await engine.client.pause(mode)
            if swaps and mode == "abort":
                await engine.client.pause("retract")  # `abort` does not pause the scheduler, which swaps
        engine.paused = True
        self._notify()
        if broken:
            await close_open_update(engine.client)
        swapped = prepared if swaps else None
        if swapped is not None and await self._filling.swap(engine, version, swapped, flush=not keeps_cache):
            transport, verified = PREPARED, swapped.verified
        elif engine.memory is Memory.HELD:
            path = await self._records.folder(version, delivery.folder) if swaps else path
            transport, verified = await self._filling.load(
                engine.client, version, path, delivery, flush=not keeps_cache
            )
        else:
            transport, verified = await self._filling.reload(engine, version, path, delivery)
        await engine.client.continue_generation()
        claim.whole = True
        engine.seen = engine.changes
        engine.version = engine.label = version
        engine.adapter, engine.paused = None, False
        return Loaded(time.monotonic() - started, transport, verified, swapped if transport == PREPARED else None)
