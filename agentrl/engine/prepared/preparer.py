"""Prepares one version at a time, beside the one that serves: fetch it into the host's cache, stage it, swap it in.

    prepare(v12) ──► fetch in a thread ──► Stager.stage ──► READY ──swap(v12), while paused──► none
    prepare(v13) meanwhile: v12 is discarded; its fetch ends at the next piece that it reads

A failure changes nothing in the weights that serve. Fetch and stage run outside the event loop's thread.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from agentrl.engine.control.preparation import MOST_ERROR, Order, Preparation, PreparationState, Swap
from agentrl.errors import AgentRLError, NotPrepared

Watch = Callable[[int], None]
"""Called with the number of bytes of each piece that a fetch reads. Raises Replaced to end the fetch."""
Fetch = Callable[[Order, Watch], AbstractContextManager[Path]]
"""Holds a folder with the version's whole files, verified, while the block runs. Raises StorageError."""
Digests = list[dict[str, str]]
"""The digests of each rank: the engine's name of a tensor → digest."""


class Replaced(AgentRLError):
    """Another version is prepared instead."""


class Stager(Protocol):
    """Puts weights beside those in use, and exchanges them."""

    async def stage(self, folder: Path, order: Order) -> Digests | None:
        """Load the folder beside the weights in use, in all ranks; returns digests if ordered. Raises EngineError."""
        ...

    async def swap(self, order: Swap) -> float:
        """Exchange the weights in all ranks; returns the seconds of work.

        Raises NotPrepared when nothing was changed, another EngineError when the weights are of no version.
        """
        ...

    async def discard(self) -> None:
        """Forget what is staged or being staged; returns when nothing writes to it any more."""
        ...


@dataclass(slots=True)
class _Attempt:
    """One preparation. `stopped` ends its fetch."""

    order: Order
    state: PreparationState = PreparationState.FETCHING
    error: str | None = None
    bytes: int = 0
    fetch_s: float = 0.0
    stage_s: float = 0.0
    digests: Digests | None = None
    stopped: threading.Event = field(default_factory=threading.Event)

    def watch(self, n_bytes: int) -> None:
        self.bytes += n_bytes
        if self.stopped.is_set():
            raise Replaced(f"{self.order.name} was replaced by another version")

    def does(self, order: Order) -> bool:
        """Whether this attempt makes another one for `order` needless."""
        same = self.order.name == order.name and self.order.checksum == order.checksum
        return same and self.state is not PreparationState.FAILED and self.order.digests >= order.digests


class Preparer:
    """The preparations of one engine. Used in one event loop."""

    def __init__(self, fetch: Fetch, stager: Stager) -> None:
        self._fetch = fetch
        self._stager = stager
        self._attempt: _Attempt | None = None
        self._task: asyncio.Task[None] | None = None
        self._swapping = asyncio.Lock()

    def preparation(self) -> Preparation:
        """How far it is."""
        attempt = self._attempt
        if attempt is None:
            return Preparation()
        return Preparation(
            name=attempt.order.name,
            version=attempt.order.version,
            checksum=attempt.order.checksum,
            state=attempt.state,
            error=attempt.error,
            bytes=attempt.bytes,
            fetch_s=round(attempt.fetch_s, 4),
            stage_s=round(attempt.stage_s, 4),
        )

    def prepare(self, order: Order) -> Preparation:
        """Begin to prepare a version, unless this is being done; another version is discarded."""
        if self._attempt is None or not self._attempt.does(order):
            before = self._task
            self.forget()
            self._attempt = _Attempt(order)
            self._task = asyncio.create_task(self._run(self._attempt, before))
        return self.preparation()

    def forget(self) -> None:
        """Discard the preparation, for example because other weights are loaded into the engine."""
        if self._attempt is not None:
            self._attempt.stopped.set()
            self._attempt = None

    def digests(self) -> tuple[str, Digests]:
        """The name of the version that is ready, and the digests of its weights. Raises NotPrepared."""
        attempt = self._attempt
        if attempt is None or attempt.state is not PreparationState.READY or attempt.digests is None:
            raise NotPrepared("no version is ready whose digests were ordered")
        return attempt.order.name, attempt.digests

    async def swap(self, order: Swap) -> float:
        """Swap the version in; see `Stager.swap`. Goes on to its end when the caller is cancelled."""
        return await asyncio.shield(asyncio.create_task(self._swap(order)))

    async def _swap(self, order: Swap) -> float:
        async with self._swapping:
            if not self.preparation().is_ready(order.name):
                found = self.preparation()
                raise NotPrepared(f"{order.name} is not ready: the preparation of {found.name} is {found.state}")
            swapped = self._attempt
            try:
                seconds = await self._stager.swap(order)
            except NotPrepared:
                raise  # it can be swapped in later
            except AgentRLError:
                self._end(swapped)
                raise
            self._end(swapped)
            return seconds

    def _end(self, attempt: _Attempt | None) -> None:
        """Forget an attempt that is over, unless another version was ordered meanwhile."""
        if self._attempt is attempt:
            self._attempt = None

    async def _run(self, attempt: _Attempt, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await asyncio.wait([before])
        held = ExitStack()
        try:
            async with self._swapping:
                await self._stager.discard()
            await self._fetch_and_stage(attempt, held)
        except (AgentRLError, OSError, ValueError) as error:
            attempt.error = str(error)[:MOST_ERROR] or type(error).__name__
        finally:
            if attempt.state is not PreparationState.READY:
                attempt.state = PreparationState.FAILED
            await asyncio.to_thread(held.close)

    async def _fetch_and_stage(self, attempt: _Attempt, held: ExitStack) -> None:
        began = time.monotonic()
        attempt.watch(0)
        folder = await asyncio.to_thread(self._enter, held, attempt)
        attempt.fetch_s = time.monotonic() - began
        attempt.watch(0)
        attempt.state = PreparationState.STAGING
        attempt.digests = await self._stager.stage(folder, attempt.order)
        attempt.stage_s = time.monotonic() - began - attempt.fetch_s
        attempt.state = PreparationState.READY

    def _enter(self, held: ExitStack, attempt: _Attempt) -> Path:
        return held.enter_context(self._fetch(attempt.order, attempt.watch))
