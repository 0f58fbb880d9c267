"""Pages that many viewers open are made once: a page is shared for a moment, and made by one request at a time.

So the dashboard's cost does not grow with the number of open pages, and a page whose reads take long is made seldom.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")
SHARED_S = 1.0
"""How long a page is shared at least."""
REST = 4.0
"""A page that took a long time is shared for this many times as long, so that pages take at most a share of a core."""
MOST_PAGES = 64


@dataclass(slots=True)
class _Made(Generic[T]):
    making: asyncio.Task[T]
    until: float = float("inf")  # time.monotonic


@dataclass(slots=True)
class SharedPages(Generic[T]):
    """The pages of the last moments, by their address and viewer."""

    _made: dict[str, _Made[T]] = field(default_factory=dict)

    async def get(self, name: str, make: Callable[[], Awaitable[T]]) -> T:
        """The page of this name: one that is being made or was made a moment ago, else a new one."""
        self._drop_old()
        made = self._made.get(name)
        if made is None:
            made = self._made[name] = _Made(asyncio.create_task(self._make(name, make)))
        return await asyncio.shield(made.making)

    async def _make(self, name: str, make: Callable[[], Awaitable[T]]) -> T:
        began = time.monotonic()
        try:
            page = await make()
        except BaseException:
            self._made.pop(name, None)
            raise
        took = time.monotonic() - began
        self._made[name].until = time.monotonic() + max(SHARED_S, REST * took)
        return page

    def _drop_old(self) -> None:
        now = time.monotonic()
        for name in [name for name, made in self._made.items() if made.until < now]:
            del self._made[name]
        while len(self._made) >= MOST_PAGES:
            del self._made[next(iter(self._made))]
