"""Tells open pages that their run has changed: one watcher for each run that somebody looks at, by server-sent events.

The watcher reads a mark of the run (`change_mark`), a few rows, whatever the number of pages. A page that is told so
fetches itself again. Every replica watches the database, so pages are told of the changes of all of them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field

from agentrl.errors import StoreError

log = logging.getLogger(__name__)
WATCH_EVERY_S = 1.0
TELL_EVERY_S = 5.0
"""Pages are told at most this often, so that a run at full speed pays for few of them."""
ALIVE_EVERY_S = 15.0
"""How often a connection without news gets a comment, so that nothing between closes it."""
MOST_LISTENERS = 256

Mark = Callable[[str], Awaitable[str]]


@dataclass(slots=True, eq=False)
class _Listener:
    known: str | None  # the mark of what its page shows
    changed: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(slots=True)
class _Watched:
    listeners: set[_Listener] = field(default_factory=set)
    task: asyncio.Task[None] | None = None
    noticed_at: float = 0.0  # the last change; time.monotonic


class LiveUpdates:
    """The watchers of a process. `mark` reads the mark of a run."""

    def __init__(self, mark: Mark) -> None:
        self._mark = mark
        self._watched: dict[str, _Watched] = {}

    @property
    def watchers(self) -> int:
        """How many runs are watched."""
        return len(self._watched)

    @property
    def listeners(self) -> int:
        """How many pages listen."""
        return sum(len(watched.listeners) for watched in self._watched.values())

    @property
    def is_full(self) -> bool:
        """Whether no more pages can listen."""
        return self.listeners >= MOST_LISTENERS

    def noticed_at(self, run_id: str) -> float:
        """When the watcher of a run noticed the last change (time.monotonic); 0 without one."""
        watched = self._watched.get(run_id)
        return 0.0 if watched is None else watched.noticed_at

    async def events(self, run_id: str, known: str | None = None) -> AsyncIterator[bytes]:
        """The stream of one page: a `changed` event after each change of the run, without end.

        `known` is the mark of the run that the page shows. A page of another mark is told at once, so it misses no
        change before its stream began, or while the stream was broken.
        """
        listener = _Listener(known)
        changed = listener.changed
        watched = self._watched.setdefault(run_id, _Watched())
        watched.listeners.add(listener)
        if watched.task is None:
            watched.task = asyncio.create_task(self._watch(run_id, watched), name=f"dashboard-{run_id}")
        try:
            yield b"retry: 3000\n: watching\n\n"
            while True:
                with suppress(TimeoutError):
                    await asyncio.wait_for(changed.wait(), ALIVE_EVERY_S)
                told = changed.is_set()
                changed.clear()  # first: a change during the yield is told next time
                yield b"event: changed\ndata: \n\n" if told else b": alive\n\n"
        finally:
            watched.listeners.discard(listener)
            if not watched.listeners and watched.task is not None:
                watched.task.cancel()
                self._watched.pop(run_id, None)

    async def _watch(self, run_id: str, watched: _Watched) -> None:
        """Tell all pages at the same moment, so that the one that is made for the first of them serves them all."""
        rests_until = 0.0
        while True:
            try:
                mark = await self._mark(run_id)
            except StoreError as error:
                log.info("dashboard: %s; trying again", error)
            else:
                late = [one for one in watched.listeners if one.known not in (None, mark)]
                if late and time.monotonic() >= rests_until:
                    watched.noticed_at = time.monotonic()
                    rests_until = watched.noticed_at + TELL_EVERY_S
                    for listener in late:
                        listener.changed.set()
                        listener.known = mark
                for listener in watched.listeners:
                    listener.known = listener.known or mark
            await asyncio.sleep(WATCH_EVERY_S)
