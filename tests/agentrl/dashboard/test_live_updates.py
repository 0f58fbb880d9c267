"""One watcher for each run that somebody looks at; every listener is told of a change, and of one before it came."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from agentrl.dashboard import live_updates
from agentrl.dashboard.live_updates import LiveUpdates
from agentrl.errors import StoreError

CHANGED = b"event: changed\ndata: \n\n"


class Source:
    """The marks of runs, and how often each was read."""

    def __init__(self) -> None:
        self.mark, self.fails = "1", False
        self.reads: asyncio.Queue[str] = asyncio.Queue()

    async def read(self, run_id: str) -> str:
        self.reads.put_nowait(run_id)
        if self.fails:
            raise StoreError("away")
        return self.mark

    async def more_reads(self, n: int = 2) -> None:
        """Wait for so many reads from now on."""
        for _ in range(self.reads.qsize() + n):
            await self.reads.get()


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch) -> Source:
    monkeypatch.setattr(live_updates, "WATCH_EVERY_S", 0.002)
    monkeypatch.setattr(live_updates, "TELL_EVERY_S", 0.001)
    return Source()


async def opened(live: LiveUpdates, run_id: str = "a", known: str | None = None) -> AsyncIterator[bytes]:
    """A stream past its first words."""
    stream = live.events(run_id, known)
    assert (await anext(stream)).startswith(b"retry:")
    return stream


async def closed(*streams: AsyncIterator[bytes]) -> None:
    for stream in streams:
        await stream.aclose()  # type: ignore[attr-defined]


async def test_all_pages_of_a_run_cost_one_watcher_which_ends_with_the_last(source: Source) -> None:
    live = LiveUpdates(source.read)
    streams = [await opened(live) for _ in range(5)] + [await opened(live, "b")]
    assert (live.watchers, live.listeners) == (2, 6)
    await source.more_reads(4)
    assert sum(task.get_name().startswith("dashboard-") for task in asyncio.all_tasks()) == 2
    await closed(*streams)
    assert (live.watchers, live.listeners) == (0, 0)
    await asyncio.sleep(0)
    assert not any(task.get_name().startswith("dashboard-") for task in asyncio.all_tasks())


async def test_every_page_is_told_of_a_change(source: Source) -> None:
    live = LiveUpdates(source.read)
    streams = [await opened(live) for _ in range(3)]
    await source.more_reads()
    assert live.noticed_at("a") == 0.0
    source.mark = "2"
    assert [await anext(stream) for stream in streams] == [CHANGED] * 3
    assert live.noticed_at("a") > 0.0
    assert live.noticed_at("b") == 0.0
    await closed(*streams)


async def test_a_page_whose_run_has_changed_before_it_listened_is_told(source: Source) -> None:
    live = LiveUpdates(source.read)
    first = await opened(live, known="1")
    await source.more_reads()
    old = await opened(live, known="0")
    assert await anext(old) == CHANGED
    source.mark = "2"
    assert await anext(first) == CHANGED
    await closed(first, old)


async def test_a_change_while_a_page_is_being_told_is_told_next(source: Source) -> None:
    live = LiveUpdates(source.read)
    stream = await opened(live, known="1")
    source.mark = "2"
    assert await anext(stream) == CHANGED  # suspended in the middle of telling
    source.mark = "3"
    await source.more_reads()
    assert await asyncio.wait_for(anext(stream), 5) == CHANGED
    await closed(stream)


async def test_a_quiet_run_sends_comments(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_updates, "ALIVE_EVERY_S", 0.001)
    stream = await opened(LiveUpdates(source.read), known="1")
    assert await anext(stream) == b": alive\n\n"
    await closed(stream)


async def test_a_watcher_outlives_a_database_that_is_away(source: Source) -> None:
    live = LiveUpdates(source.read)
    stream = await opened(live, known="1")
    source.fails = True
    await source.more_reads()
    source.fails, source.mark = False, "2"
    assert await anext(stream) == CHANGED
    await closed(stream)


async def test_listeners_are_bounded(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_updates, "MOST_LISTENERS", 2)
    live = LiveUpdates(source.read)
    streams = [await opened(live), await opened(live, "b")]
    full = [live.is_full]
    await closed(streams.pop())
    assert [*full, live.is_full] == [True, False]
    await closed(*streams)
