"""A host's windows: memory into which it reads parts of version files, and from which other hosts read them by NIXL.

    free ─borrow─► lent ─give back, or after LEASE_S─► free

The memory is bounded whatever the files' sizes. A reader that is slower than LEASE_S may find other bytes, so it
discards what it read. ASGI: `WindowFiles` wraps `VersionFiles` and answers requests for windows.
"""

from __future__ import annotations

import asyncio
import base64
import os
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import msgspec
import numpy as np

from agentrl.errors import StorageError
from agentrl.versions.transports.memory_agent import Bytes, MemoryAgent
from agentrl.versions.transports.window_answer import WINDOW_BYTES, WINDOW_TYPE, Window
from agentrl.versions.version_files import VersionFiles, part_of

WINDOWS = 8
LEASE_S = 30.0


@dataclass(slots=True)
class _Slot:
    memory: Bytes
    id: str = ""
    until: float = 0.0


class Windows:
    """`count` windows of one agent, which is made for the first that is lent. Several threads may use them."""

    def __init__(
        self,
        make_agent: Callable[[], MemoryAgent] = MemoryAgent,
        count: int = WINDOWS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._make_agent = make_agent
        self._count = count
        self._clock = clock
        self._lock = threading.Lock()
        self._agent: MemoryAgent | None = None
        self._metadata = ""
        self._slots: list[_Slot] = []

    def lend(self, path: Path, start: int, end: int) -> Window | None:
        """Read a part of a file into a window; None when all are lent.

        Raises StorageError without NIXL, and OSError of the disk.
        """
        slot = self._borrowed()
        if slot is None:
            return None
        lent = slot.id
        try:
            size = _read(path, start, slot.memory[: end - start])
        except OSError:
            self.give_back(lent)
            raise
        return Window(lent, self._metadata, slot.memory.ctypes.data, size, LEASE_S)

    def give_back(self, id: str) -> None:
        """Free a window; nothing happens for one that is not lent."""
        with self._lock:
            for slot in self._slots:
                if id and slot.id == id:
                    slot.id = ""

    def _borrowed(self) -> _Slot | None:
        with self._lock:
            if self._agent is None:
                self._start()
            now = self._clock()
            for slot in self._slots:
                if not slot.id or slot.until <= now:
                    slot.id, slot.until = uuid.uuid4().hex, now + LEASE_S
                    return slot
            return None

    def _start(self) -> None:
        """Make the agent and register the memory."""
        agent = self._make_agent()
        slots = [_Slot(np.empty(WINDOW_BYTES, np.uint8)) for _ in range(self._count)]
        for slot in slots:
            agent.register(slot.memory)
        self._agent, self._slots = agent, slots
        self._metadata = base64.b64encode(agent.metadata()).decode()


class WindowFiles:
    """Serves windows to readers that ask for them, and everything else by `files`."""

    def __init__(self, files: VersionFiles, windows: Windows) -> None:
        self._files = files
        self._windows = windows

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request."""
        headers = {key.lower(): value for key, value in scope.get("headers", ())}
        if scope["type"] != "http" or headers.get(b"accept", b"").decode("latin-1") != WINDOW_TYPE:
            return await self._files(scope, receive, send)
        lends = scope["method"] == "GET"
        if not lends and scope["method"] != "DELETE":
            return await _answer(send, 405)
        status, path = await self._files.locate(scope)
        if path is None:
            return await _answer(send, status)
        if lends:
            return await self._lend(path, headers.get(b"range", b"").decode("latin-1"), send)
        self._windows.give_back(parse_qs(scope["query_string"].decode("latin-1")).get("window", [""])[0])
        await _answer(send, 204)

    async def _lend(self, path: Path, wanted: str, send: Any) -> None:
        try:
            part = part_of((await asyncio.to_thread(path.stat)).st_size, wanted)
            if part is None or not 0 < part.end - part.start <= WINDOW_BYTES:
                return await _answer(send, 416)
            window = await asyncio.to_thread(self._windows.lend, path, part.start, part.end)
        except FileNotFoundError:  # deleted meanwhile
            return await _answer(send, 404)
        except StorageError as error:
            return await _answer(send, 406, str(error).encode())
        if window is None:
            return await _answer(send, 503)
        await _answer(send, 200, msgspec.json.encode(window))


def _read(path: Path, start: int, target: Bytes) -> int:
    """Read a part of a file to memory; the number of bytes that the file has."""
    size = 0
    with path.open("rb", buffering=0) as file:
        while size < len(target):
            got = os.preadv(file.fileno(), [target[size:].data], start + size)
            if not got:
                break
            size += got
    return size


async def _answer(send: Any, status: int, body: bytes = b"") -> None:
    about = [(b"content-type", WINDOW_TYPE.encode()), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": about if status != 204 else []})
    await send({"type": "http.response.body", "body": body})
