"""The states of a preparation: failures, replacements and swaps, with scripted fetches and stagings."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from agentrl.engine.control.preparation import Order, PreparationState, Swap
from agentrl.engine.prepared.preparer import Digests, Preparer, Stager, Watch
from agentrl.errors import EngineError, NotPrepared, StorageError


def order(version: int, *, digests: bool = False) -> Order:
    source = {"kind": "folder", "root": "/weights"}
    return Order(version=version, name=f"v{version}-a", checksum="0" * 64, sources=[source], digests=digests)


def swap(version: int) -> Swap:
    return Swap(version=version, name=f"v{version}-a")


class Script(Stager):
    """Fetches and stages as a test says, and notes what is done, in order."""

    def __init__(self) -> None:
        self.did: list[str] = []
        self.held = 0
        self.fetch_error: Exception | None = None
        self.stage_error: Exception | None = None
        self.swap_error: Exception | None = None
        self.fetching = threading.Event()
        self.go_on = threading.Event()
        self.go_on.set()
        self.staged = asyncio.Event()
        self.staged.set()
        self.swapping, self.swapped = asyncio.Event(), asyncio.Event()
        self.swapped.set()

    @contextmanager
    def fetch(self, order: Order, watch: Watch) -> Iterator[Path]:
        self.fetching.set()
        self.go_on.wait(10)
        watch(100)
        if self.fetch_error is not None:
            raise self.fetch_error
        self.held += 1
        try:
            yield Path("/cache") / order.name
        finally:
            self.held -= 1

    async def stage(self, folder: Path, order: Order) -> Digests | None:
        await self.staged.wait()
        self.did.append(f"stage {folder.name}")
        if self.stage_error is not None:
            raise self.stage_error
        return [{"a": order.name}] if order.digests else None

    async def swap(self, order: Swap) -> float:
        self.swapping.set()
        await self.swapped.wait()
        if self.swap_error is not None:
            raise self.swap_error
        self.did.append(f"swap {order.name}")
        return 0.5

    async def discard(self) -> None:
        self.did.append("discard")


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
def preparer(script: Script) -> Preparer:
    return Preparer(script.fetch, script)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110  another thread changes it
            await asyncio.sleep(0.001)


async def ended(preparer: Preparer, script: Script) -> PreparationState:
    final = (PreparationState.READY, PreparationState.FAILED)
    await until(lambda: preparer.preparation().state in final and script.held == 0)
    return preparer.preparation().state


async def test_a_version_is_fetched_staged_and_swapped(preparer: Preparer, script: Script) -> None:
    assert preparer.prepare(order(3)).state is PreparationState.FETCHING
    assert await ended(preparer, script) is PreparationState.READY
    assert preparer.preparation().bytes == 100
    assert await preparer.swap(swap(3)) == 0.5
    assert preparer.preparation().state is PreparationState.NONE
    assert script.did == ["discard", "stage v3-a", "swap v3-a"]


@pytest.mark.parametrize("error", [None, EngineError("one rank has failed")])
async def test_a_version_that_is_ordered_during_a_swap_is_prepared(
    preparer: Preparer, script: Script, error: EngineError | None
) -> None:
    preparer.prepare(order(3))
    await ended(preparer, script)
    script.swapped.clear()
    swapping = asyncio.create_task(preparer.swap(swap(3)))
    await script.swapping.wait()
    script.swap_error = error
    preparer.prepare(order(4))
    script.swapped.set()
    (swapped,) = await asyncio.gather(swapping, return_exceptions=True)
    assert swapped == (error or 0.5)
    assert preparer.preparation().name == "v4-a"
    assert await ended(preparer, script) is PreparationState.READY


async def test_the_same_order_is_prepared_once(preparer: Preparer, script: Script) -> None:
    preparer.prepare(order(3))
    preparer.prepare(order(3))
    await ended(preparer, script)
    assert preparer.prepare(order(3)).state is PreparationState.READY
    assert script.did == ["discard", "stage v3-a"]


async def test_an_order_of_digests_is_not_answered_without_them(preparer: Preparer, script: Script) -> None:
    preparer.prepare(order(3))
    await ended(preparer, script)
    with pytest.raises(NotPrepared):
        preparer.digests()
    preparer.prepare(order(3, digests=True))
    await ended(preparer, script)
    assert preparer.digests() == ("v3-a", [{"a": "v3-a"}])


@pytest.mark.parametrize("where", ["fetch", "stage"])
async def test_a_failure_is_reported_and_may_be_tried_again(preparer: Preparer, script: Script, where: str) -> None:
    setattr(script, f"{where}_error", StorageError("no room") if where == "fetch" else EngineError("no room"))
    preparer.prepare(order(3))
    assert await ended(preparer, script) is PreparationState.FAILED
    assert preparer.preparation().error == "no room"
    with pytest.raises(NotPrepared, match="failed"):
        await preparer.swap(swap(3))
    script.fetch_error = script.stage_error = None
    preparer.prepare(order(3))
    assert await ended(preparer, script) is PreparationState.READY


async def test_a_newer_version_replaces_one_that_is_being_fetched(preparer: Preparer, script: Script) -> None:
    script.go_on.clear()
    preparer.prepare(order(3))
    await until(script.fetching.is_set)
    assert preparer.prepare(order(4)).name == "v4-a"
    script.go_on.set()
    assert await ended(preparer, script) is PreparationState.READY
    assert script.did == ["discard", "discard", "stage v4-a"]  # the fetch of version 3 ended at its first piece


async def test_a_newer_version_replaces_one_that_is_being_staged(preparer: Preparer, script: Script) -> None:
    script.staged.clear()
    preparer.prepare(order(3))
    await until(lambda: preparer.preparation().state is PreparationState.STAGING)
    preparer.prepare(order(4))
    script.staged.set()
    assert await ended(preparer, script) is PreparationState.READY
    assert script.did == ["discard", "stage v3-a", "discard", "stage v4-a"]
    with pytest.raises(NotPrepared):
        await preparer.swap(swap(3))
    assert await preparer.swap(swap(4)) == 0.5


async def test_a_refused_swap_can_be_repeated(preparer: Preparer, script: Script) -> None:
    preparer.prepare(order(3))
    await ended(preparer, script)
    script.swap_error = NotPrepared("not paused")
    with pytest.raises(NotPrepared, match="not paused"):
        await preparer.swap(swap(3))
    script.swap_error = None
    assert await preparer.swap(swap(3)) == 0.5


async def test_a_swap_that_failed_in_the_middle_is_not_repeated(preparer: Preparer, script: Script) -> None:
    preparer.prepare(order(3))
    await ended(preparer, script)
    script.swap_error = EngineError("rank 1 failed")
    with pytest.raises(EngineError, match="rank 1"):
        await preparer.swap(swap(3))
    script.swap_error = None
    with pytest.raises(NotPrepared):
        await preparer.swap(swap(3))


async def test_other_weights_make_a_preparation_void(preparer: Preparer, script: Script) -> None:
    preparer.prepare(order(3))
    await ended(preparer, script)
    preparer.forget()
    assert preparer.preparation().state is PreparationState.NONE
    with pytest.raises(NotPrepared):
        await preparer.swap(swap(3))
