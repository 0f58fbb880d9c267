"""Follows the lives of tools. Each tool holds a connection, over which it says what it does."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from pathlib import Path
from types import TracebackType
from typing import Self


class ToolLedger:
    """Serves inside `with`, in a thread, on a Unix socket.

    `events` counts (role, event). The event `death` is the end of a connection without a `release`: the process that
    held the tool was killed. `held` is the number of tools that are neither released nor dead.
    """

    def __init__(self, socket: Path) -> None:
        self.socket = socket
        self.events = Counter[tuple[str, str]]()
        self.held = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="tool-ledger", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        serving = asyncio.start_unix_server(self._follow, self.socket, backlog=1024)
        asyncio.run_coroutine_threadsafe(serving, self._loop).result(10)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def of(self, event: str, role: str | None = None) -> int:
        """How often an event came, from the tools of one role or of all."""
        return sum(count for (of_role, name), count in self.events.items() if name == event and role in (None, of_role))

    async def _follow(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        role, last = "", ""
        self.held += 1
        try:
            while line := await reader.readline():
                said = json.loads(line)
                role, last = said.get("role", role), said["event"]
                self.events[role, last] += 1
        except ConnectionError:
            pass  # the process was killed with unread data
        finally:
            self.held -= 1
            if last != "release":
                self.events[role, "death"] += 1
            writer.close()
