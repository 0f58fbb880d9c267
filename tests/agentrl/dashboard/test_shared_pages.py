"""One page for many viewers: made once, shared for a moment, longer if it took long; faults are not shared."""

from __future__ import annotations

import asyncio

import pytest

from agentrl.dashboard import shared_pages
from agentrl.dashboard.shared_pages import MOST_PAGES, REST, SHARED_S, SharedPages


class Clock:
    """Replaces the time of the module."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(shared_pages, "time", made)
    return made


class Kitchen:
    """Makes pages that are numbers; each takes `takes_s` of the clock."""

    def __init__(self, clock: Clock, takes_s: float = 0.0) -> None:
        self.clock, self.takes_s, self.made = clock, takes_s, 0

    async def make(self) -> int:
        await asyncio.sleep(0)
        self.clock.now += self.takes_s
        self.made += 1
        return self.made


async def test_many_requests_at_once_make_one_page(clock: Clock) -> None:
    pages, kitchen = SharedPages[int](), Kitchen(clock)
    found = await asyncio.gather(*(pages.get("a", kitchen.make) for _ in range(50)))
    assert {one.body for one in found} == {1}
    assert (await pages.get("b", kitchen.make)).body == 2


async def test_a_page_is_shared_for_a_moment(clock: Clock) -> None:
    pages, kitchen = SharedPages[int](), Kitchen(clock)
    assert (await pages.get("a", kitchen.make)).began == clock.now
    clock.now += SHARED_S - 0.01
    assert (await pages.get("a", kitchen.make)).body == 1
    clock.now += 0.02
    assert (await pages.get("a", kitchen.make)).body == 2


async def test_a_page_that_took_long_is_shared_for_longer(clock: Clock) -> None:
    pages, kitchen = SharedPages[int](), Kitchen(clock, takes_s=2.0)
    first = await pages.get("a", kitchen.make)
    assert first.until - first.began == 2.0 + 2.0 * REST
    clock.now += 2.0 * REST - 0.1
    assert (await pages.get("a", kitchen.make)).body == 1
    clock.now += 0.2
    assert (await pages.get("a", kitchen.make)).body == 2


async def test_a_fault_reaches_whoever_waits_and_the_next_request_tries_again(clock: Clock) -> None:
    pages, kitchen = SharedPages[int](), Kitchen(clock)

    async def fail() -> int:
        raise ValueError("no")

    for _ in range(2):
        found = await asyncio.gather(*(pages.get("a", fail) for _ in range(3)), return_exceptions=True)
        assert [type(one) for one in found] == [ValueError] * 3
    assert (await pages.get("a", kitchen.make)).body == 1


async def test_a_viewer_that_leaves_does_not_stop_the_page_of_the_others(clock: Clock) -> None:
    pages, kitchen = SharedPages[int](), Kitchen(clock)
    gate = asyncio.Event()

    async def slow() -> int:
        await gate.wait()
        return await kitchen.make()

    first, second = (asyncio.create_task(pages.get("a", slow)) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    gate.set()
    assert (await second).body == 1


async def test_more_pages_than_are_kept_can_be_made_at_once(clock: Clock) -> None:
    pages, kitchen = SharedPages[int](), Kitchen(clock)
    found = await asyncio.gather(*(pages.get(str(n), kitchen.make) for n in range(MOST_PAGES + 20)))
    assert len({one.body for one in found}) == MOST_PAGES + 20
