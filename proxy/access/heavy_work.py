"""Threads for work that would block the event loop: decoding, hashing, rendering and encoding large bodies.

Small bodies are processed on the event loop, because a thread would cost more. A session uses at most half of the
threads; its other large requests wait, so that they do not delay other sessions. The bytes that wait are bounded: a
request beyond the bound gets 429.
"""

from __future__ import annotations

import asyncio
import os
from asyncio import Semaphore
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from agentrl.errors import RequestError

T = TypeVar("T")
INLINE_BYTES = 32 * 1024
"""Smaller requests are processed on the event loop: they take a few milliseconds."""
WORKERS = max(2, min(4, os.cpu_count() or 1))
MOST_BYTES, MOST_BYTES_OF_ONE = 512 * 1024 * 1024, 256 * 1024 * 1024
"""Maximum bytes of requests that are in work or waiting: of all sessions, and of one session."""
RETRY_AFTER_S = 1.0


@dataclass(slots=True)
class _Load:
    """The large requests of one session."""

    turns: Semaphore
    size: int = 0
    pieces: int = 0


@dataclass(slots=True)
class Heavy:
    """The threads for large requests, of one process."""

    workers: int = WORKERS
    size: int = 0  # bytes in work or waiting
    _pool: ThreadPoolExecutor = field(init=False)
    _of: dict[str, _Load] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._pool = ThreadPoolExecutor(self.workers, "heavy")

    async def run(self, session_id: str, size: int, work: Callable[..., T], *args: Any) -> T:
        """Run `work(*args)`, which reads about `size` bytes, for a session. Raises RequestError 429, or as `work`.

        Work that has begun is finished even if its caller is cancelled.
        """
        if size < INLINE_BYTES:
            return work(*args)
        load = self._begin(session_id, size)
        try:
            await load.turns.acquire()
        except BaseException:
            self._over(session_id, size)
            raise
        loop = asyncio.get_running_loop()

        def ended() -> None:
            load.turns.release()
            self._over(session_id, size)

        future = self._pool.submit(work, *args)
        future.add_done_callback(lambda _: loop.call_soon_threadsafe(ended))
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """Wait for running work; waiting work is dropped."""
        self._pool.shutdown(cancel_futures=True)

    def _begin(self, session_id: str, size: int) -> _Load:
        load = self._of.get(session_id) or _Load(Semaphore(self.workers // 2))
        if self.size + size > MOST_BYTES or load.size + size > MOST_BYTES_OF_ONE:
            message = f"the proxy is at work on {self.size} bytes of large requests, {load.size} of them this session's"
            raise RequestError(429, message, code="too_many_calls", retry_after_s=RETRY_AFTER_S)
        self._of[session_id] = load
        self.size += size
        load.size += size
        load.pieces += 1
        return load

    def _over(self, session_id: str, size: int) -> None:
        load = self._of[session_id]
        self.size -= size
        load.size -= size
        load.pieces -= 1
        if not load.pieces:
            del self._of[session_id]
