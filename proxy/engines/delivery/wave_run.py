"""Moves the engines of a run to a version: each is prepared, then changes its weights in its wave.

    preparing ─ ready, or it cannot prepare ─► due ─ chosen by `next_wave` ─► changing ─► done

A slow engine delays no other one. After a StoreError no further engine begins; those that are changing finish.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from agentrl.errors import EngineError, StoreError
from agentrl.proxy.engines.delivery.preparations import Preparations, Wish
from agentrl.proxy.engines.engine_state import Engine, EngineState
from agentrl.proxy.engines.version_delivery import Loaded, Prepared
from agentrl.proxy.engines.waves import Candidate, Need, next_wave

UNLIMITED = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How many engines change at once: `publish.serving_share` and `publish.parallel`."""

    serving_share: float = 0.75
    parallel: int = 32


ALL_AT_ONCE = Pace(serving_share=0.0, parallel=UNLIMITED)


class Place(Enum):
    """How far an engine is."""

    PREPARING = "preparing"
    DUE = "due"
    CHANGING = "changing"
    DONE = "done"


@dataclass(slots=True)
class _Member:
    engine: Engine
    place: Place = Place.DUE
    prepared: Prepared | None = None
    in_service: bool = False  # when its change began


@dataclass(slots=True)
class Outcome:
    """What became of the engines: those that have the version, by URL, and the errors of the others."""

    loaded: dict[str, Loaded] = field(default_factory=dict)
    problems: list[EngineError] = field(default_factory=list)


class WaveRun:
    """One version on its way to `engines`.

    `load` changes an engine's weights and raises EngineError or StoreError; `lost` is told of an EngineError; `check`
    raises StoreError when no further engine may begin.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        pace: Pace,
        load: Callable[[Engine, Prepared | None], Awaitable[Loaded]],
        lost: Callable[[Engine, EngineError], Awaitable[None]],
        check: Callable[[], None],
    ) -> None:
        self._members = {engine.url: _Member(engine) for engine in engines}
        self._pace = pace
        self._load, self._lost, self._check = load, lost, check
        self._changed = asyncio.Event()
        self._fault: StoreError | None = None
        self._outcome = Outcome()

    async def run(self, preparations: Preparations | None, wish: Wish | None) -> Outcome:
        """Return when every engine has the version or has failed. Raises the first StoreError."""
        async with asyncio.TaskGroup() as group:
            preparing: asyncio.Task[None] | None = None
            if preparations is not None and wish is not None:
                engines = self._preparing()
                preparing = group.create_task(preparations.spread(engines, wish, self._ready))
            while not self._is_over():
                self._changed.clear()
                for url in self._next():
                    group.create_task(self._change(self._members[url]))
                if not self._is_over():
                    await self._changed.wait()
            if preparing is not None:
                preparing.cancel()
        if self._fault is not None:
            raise self._fault
        return self._outcome

    def _preparing(self) -> list[Engine]:
        """The engines that are asked to prepare the version: those that may answer."""
        members = [member for member in self._members.values() if member.engine.state is not EngineState.DEAD]
        for member in members:
            member.place = Place.PREPARING
        return [member.engine for member in members]

    def _ready(self, engine: Engine, prepared: Prepared | None) -> None:
        """An engine has prepared the version, or has to load it."""
        member = self._members[engine.url]
        member.place, member.prepared = Place.DUE, prepared
        self._changed.set()

    def _is_over(self) -> bool:
        places = {member.place for member in self._members.values()}
        return Place.CHANGING not in places and (self._fault is not None or places <= {Place.DONE})

    def _next(self) -> list[str]:
        """The engines that begin to change now."""
        if self._fault is not None:
            return []
        candidates = (_candidate(member) for member in self._members.values())
        wave = next_wave(candidates, serving_share=self._pace.serving_share, parallel=self._pace.parallel)
        for url in wave:
            member = self._members[url]
            member.in_service, member.place = member.engine.state is EngineState.SERVING, Place.CHANGING
        return wave

    async def _change(self, member: _Member) -> None:
        """Change the weights of one engine."""
        engine = member.engine
        try:
            if self._fault is None:
                self._check()
                self._outcome.loaded[engine.url] = await self._load(engine, member.prepared)
        except EngineError as error:
            self._outcome.problems.append(error)
            await self._lost(engine, error)
        except StoreError as error:
            self._fault = self._fault or error
        finally:
            member.place = Place.DONE
            self._changed.set()


def _candidate(member: _Member) -> Candidate:
    changing = member.place is Place.CHANGING
    return Candidate(
        url=member.engine.url,
        need=Need.NOW if member.place is Place.DUE else Need.NOTHING,
        in_service=member.in_service if changing else member.engine.state is EngineState.SERVING,
        changing=changing,
        prepared=member.prepared is not None,
        current=member.place is Place.DONE,
        running=member.engine.running,
    )
