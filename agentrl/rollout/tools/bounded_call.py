"""Awaits foreign code for a bounded time, even if it ignores its cancellation."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

GRACE_S = 1.0
"""How long cancelled code may take to end. It is left alone after that."""

_left_alone: set[asyncio.Future[Any]] = set()


class TookTooLong(Exception):
    """The time is over, and the code was cancelled."""


class WasCancelled(Exception):
    """The code raised CancelledError without being cancelled."""


async def bounded(work: Awaitable[Any], timeout_s: float) -> Any:
    """The result of `work`. Raises TookTooLong, WasCancelled, or what it raised; SystemExit as RuntimeError."""
    task = asyncio.ensure_future(_guarded(work))
    try:
        await asyncio.wait([task], timeout=timeout_s)
    except asyncio.CancelledError:
        await cancel(task)
        raise
    if not task.done():
        await cancel(task)
        raise TookTooLong
    if task.cancelled():
        raise WasCancelled
    return task.result()


async def _guarded(work: Awaitable[Any]) -> Any:
    try:
        return await work
    except (SystemExit, KeyboardInterrupt) as error:  # these would end the event loop
        raise RuntimeError(f"{type(error).__name__}: {error}") from None


async def cancel(task: asyncio.Future[Any]) -> None:
    """Cancel a task, and give it GRACE_S to end. What it raises is dropped."""
    task.cancel()
    _left_alone.add(task)
    task.add_done_callback(_ended)
    await asyncio.wait([task], timeout=GRACE_S)


def _ended(task: asyncio.Future[Any]) -> None:
    _left_alone.discard(task)
    if not task.cancelled():
        task.exception()  # read, so that asyncio does not report it
