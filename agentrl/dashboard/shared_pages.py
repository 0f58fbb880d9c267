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


@dataclass(frozen=True, slots=True)
class SharedPage(Generic[T]):
    """A page, when its reads began, and until when it is shared (time.monotonic)."""

    body: T
    began: float
    until: float


@dataclass(slots=True, eq=False)
class _Made(Generic[T]):
    making: asyncio.Task[SharedPage[T]] | None = None
    until: float = float("inf")  # time.monotonic


@dataclass(slots=True)
class SharedPages(Generic[T]):
    """The pages of the last moments, by their address and viewer."""

    _made: dict[str, _Made[T]] = field(default_factory=dict)

    async def get(self, name: str, make: Callable[[], Awaitable[T]]) -> SharedPage[T]:
        """The page of this name: one that is being made or was made a moment ago, else a new one."""
        self._drop_old()
        made = self._made.get(name)
        if made is None:
            made = self._made[name] = _Made()
            made.making = asyncio.create_task(self._make(name, made, make))
        assert made.making is not None
        return await asyncio.shield(made.making)

    async def _make(self, name: str, made: _Made[T], make: Callable[[], Awaitable[T]]) -> SharedPage[T]:
        began = time.monotonic()
        try:
            body = await make()
        except BaseException:
            if self._made.get(name) is made:
                del self._made[name]
            raise
        took = time.monotonic() - began
        made.until = began + took + max(SHARED_S, REST * took)
        return SharedPage(body, began, made.until)

    def _drop_old(self) -> None:
        now = time.monotonic()
        for name in [name for name, made in self._made.items() if made.until < now]:
            del self._made[name]
        while len(self._made) >= MOST_PAGES:
            del self._made[next(iter(self._made))]
