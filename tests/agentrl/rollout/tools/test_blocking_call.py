"""Blocking tools run in threads of their own, whose number is bounded."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import pytest

from agentrl.rollout.tools import blocking_call
from agentrl.rollout.tools.blocking_call import MAX_THREADS, in_thread
from agentrl.rollout.tools.tool_result import ToolBroken

episode: ContextVar[str] = ContextVar("episode", default="none")


@pytest.fixture
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only one call may run."""
    monkeypatch.setattr(blocking_call, "_running", threading.BoundedSemaphore(1))


async def test_a_call_runs_in_another_thread_with_the_context_of_its_caller() -> None:
    def found(*args: int, **more: int) -> tuple[Any, ...]:
        return threading.current_thread().name, episode.get(), args, more

    episode.set("mine")
    assert await in_thread(found, 1, b=2) == ("tool-found", "mine", (1,), {"b": 2})


async def test_what_a_tool_raises_is_its_callers_to_handle(one_thread: None) -> None:
    with pytest.raises(ZeroDivisionError):
        await in_thread(lambda: 1 / 0)
    assert await in_thread(lambda: 1) == 1  # the place is free again


@pytest.mark.parametrize("error", [StopIteration("over"), SystemExit(3), KeyboardInterrupt()], ids=repr)
async def test_what_a_future_cannot_hold_becomes_a_runtime_error(error: BaseException) -> None:
    def fails() -> None:
        raise error

    with pytest.raises(RuntimeError, match=f"^{type(error).__name__}: {error}$"):
        await in_thread(fails)


async def test_a_call_beyond_the_bound_is_refused_until_one_has_ended(one_thread: None) -> None:
    go_on = threading.Event()
    first = asyncio.create_task(in_thread(go_on.wait))
    await asyncio.sleep(0)
    with pytest.raises(ToolBroken, match=f"^{MAX_THREADS} calls of blocking tools are running in this process$"):
        await in_thread(lambda: 1)
    go_on.set()
    assert await first is True
    assert await in_thread(lambda: 1) == 1


async def test_a_thread_that_cannot_start_leaves_its_place_free(
    one_thread: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(ToolBroken, match=r"^no thread for a blocking tool: can't start new thread$"):
            await in_thread(lambda: 1)
    assert await in_thread(lambda: 1) == 1


def waiting(go_on: threading.Event, raises: bool) -> Callable[[], None]:
    def wait() -> None:
        go_on.wait()
        if raises:
            raise ValueError

    return wait


@pytest.mark.parametrize("raises", [False, True])
async def test_a_call_that_outlives_its_caller_ends_unheard(one_thread: None, raises: bool) -> None:
    go_on = threading.Event()
    call = asyncio.create_task(in_thread(waiting(go_on, raises)))
    await asyncio.sleep(0)
    (thread,) = (one for one in threading.enumerate() if one.name == "tool-wait")
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    go_on.set()
    await asyncio.to_thread(thread.join)
    assert await in_thread(lambda: 1) == 1


def test_a_call_that_outlives_the_loop_ends_unheard() -> None:
    go_on = threading.Event()

    async def abandon() -> None:
        call = asyncio.create_task(in_thread(waiting(go_on, False)))
        await asyncio.sleep(0)
        call.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await call

    asyncio.run(abandon())
    (thread,) = (one for one in threading.enumerate() if one.name == "tool-wait")
    go_on.set()
    thread.join()
