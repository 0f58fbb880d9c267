"""The hosted processes of a pool, and those that are ending."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Generic, TypeVar

from agentrl.processes.hosted import HostedProcess

Hosted = TypeVar("Hosted", bound=HostedProcess)


class HostedSet(Generic[Hosted]):
    """Processes in the order of their start."""

    def __init__(self) -> None:
        self._processes: list[Hosted] = []
        self._ending: set[asyncio.Task[None]] = set()

    def __iter__(self) -> Iterator[Hosted]:
        return iter(self._processes)

    def __len__(self) -> int:
        return len(self._processes)

    def add(self, process: Hosted) -> None:
        """Add a process that has started."""
        self._processes.append(process)

    def discard_retired(self) -> None:
        """Forget the retiring processes that do nothing any more, and end them in the background."""
        for process in [one for one in self._processes if one.retiring and not one.running]:
            self._processes.remove(process)
            ending = asyncio.create_task(process.stop())
            self._ending.add(ending)
            ending.add_done_callback(self._ending.discard)

    async def stop(self) -> None:
        """End all processes."""
        await asyncio.gather(*(process.stop() for process in self._processes), *self._ending)
