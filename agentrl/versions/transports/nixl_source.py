"""Version files of another host, read from windows of its memory by NIXL; manifests come over HTTP.

    reader ──GET, Range, Accept: window──► host reads the part into a window ──► agent, address, size
    reader ◄═══════ one-sided read of the window ═══════ host                then DELETE: the window is free again

A host without NIXL answers 406, and a plain file for one that does not know windows: the reader takes its next source,
which is the same host over HTTP.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

import httpx
import numpy as np
from pydantic import Field

from agentrl.configs.section import Section
from agentrl.errors import DamagedObject, StorageError
from agentrl.versions.http_source import TIMEOUT, HTTPSource
from agentrl.versions.transports.memory_agent import Bytes, MemoryAgent
from agentrl.versions.transports.window_answer import MOST_ANSWER, WINDOW_BYTES, WINDOW_TYPE, Window, read_window
from agentrl.versions.version_manifest import VersionManifest

BUFFERS = 4
"""Parts that a source reads at once."""
BUSY_TRIES = 20
PAUSE_S = 0.25
"""Wait until a host asks again that has lent all its windows."""


class NIXLSpec(Section):
    """A host that serves version files below `url`, as HTTPSpec, and lends windows of its memory."""

    kind: Literal["nixl"] = "nixl"
    url: str
    token: str = Field(repr=False)


class NIXLSource:
    """Version folders of another host, whose files are read from its memory. The agent is made for the first read."""

    def __init__(
        self,
        url: str,
        token: str,
        make_agent: Callable[[], MemoryAgent] = MemoryAgent,
        pause: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._http = HTTPSource(url, token, pause)
        self._url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {token}", "Accept": WINDOW_TYPE}
        self._make_agent = make_agent
        self._pause = pause
        self._clock = clock
        self._lock = threading.Lock()
        self._places = threading.BoundedSemaphore(BUFFERS)
        self._agent: MemoryAgent | None = None
        self._buffers: list[Bytes] = []

    def __str__(self) -> str:
        return f"{self._url} (NIXL)"

    def manifest(self, name: str) -> VersionManifest | None:
        """See `Source`."""
        return self._http.manifest(name)

    def read(self, name: str, file: str, start: int, end: int) -> Iterator[bytes]:
        """See `Source`."""
        if start >= end:
            return
        url = f"{self._url}/{name}/{file}"
        with self._buffer(url) as (agent, buffer):
            for at in range(start, end, WINDOW_BYTES):
                target = buffer[: min(WINDOW_BYTES, end - at)]
                self._read_part(agent, url, at, target)
                yield target.tobytes()

    def _read_part(self, agent: MemoryAgent, url: str, at: int, target: Bytes) -> None:
        """Read a part of a file to `target`. Raises StorageError."""
        asked = self._clock()
        window = self._lent(url, at, target.nbytes)
        until = asked + window.seconds
        try:
            agent.read(window.metadata, window.address, target, until)
            if self._clock() >= until:
                raise StorageError("the window was lent again while it was read")
        except DamagedObject as error:
            raise DamagedObject(f"cannot read {url}: {error}") from error
        except StorageError as error:
            raise StorageError(f"cannot read {url}: {error}") from error
        self._give_back(url, window)

    def _lent(self, url: str, at: int, size: int) -> Window:
        """Ask the host for a window with a part of a file, until it has one. Raises StorageError."""
        headers = self._headers | {"Range": f"bytes={at}-{at + size - 1}"}
        for _ in range(BUSY_TRIES):
            status, kind, body = _asked(url, headers)
            if status != 503:
                break
            self._pause(PAUSE_S)
        if status == 404:
            raise StorageError(f"{url} does not exist")
        if status != 200 or kind != WINDOW_TYPE:
            said = body.decode("utf-8", "replace")[:200] if kind == WINDOW_TYPE else "it lends no memory"
            raise StorageError(f"cannot read {url}: it answered {status} {said}".rstrip())
        try:
            window = read_window(body)
        except DamagedObject as error:
            raise DamagedObject(f"cannot read {url}: {error}") from error
        if window.size != size:
            raise DamagedObject(f"{url} is truncated: {window.size} bytes at {at} instead of {size}")
        return window

    def _give_back(self, url: str, window: Window) -> None:
        """Free a window. When that fails, the host frees it after some time."""
        with httpx.Client(timeout=TIMEOUT, trust_env=False) as http:
            try:
                http.delete(url, params={"window": window.id}, headers=self._headers)
            except httpx.TransportError:
                return

    @contextmanager
    def _buffer(self, url: str) -> Iterator[tuple[MemoryAgent, Bytes]]:
        """Registered memory, for this reader alone while the block runs. Raises StorageError.

        After a failure it is not used again: a transfer may still write to it.
        """
        with self._places:
            with self._lock:
                try:
                    agent = self._agent = self._agent or self._make_agent()
                    buffer = self._buffers.pop() if self._buffers else _registered(agent)
                except StorageError as error:
                    raise StorageError(f"cannot read {url}: {error}") from error
            yield agent, buffer
            self._buffers.append(buffer)


def _registered(agent: MemoryAgent) -> Bytes:
    buffer: Bytes = np.empty(WINDOW_BYTES, np.uint8)
    agent.register(buffer)
    return buffer


def _asked(url: str, headers: dict[str, str]) -> tuple[int, str, bytes]:
    """The status, type and body of an answer that is no file. Raises StorageError."""
    try:
        with (
            httpx.Client(timeout=TIMEOUT, trust_env=False) as http,
            http.stream("GET", url, headers=headers) as answer,
        ):
            kind, body = answer.headers.get("Content-Type", ""), b""
            if kind == WINDOW_TYPE:
                for piece in answer.iter_raw():
                    body += piece
                    if len(body) > MOST_ANSWER:
                        raise DamagedObject(f"cannot read {url}: the answer has more than {MOST_ANSWER} bytes")
            return answer.status_code, kind, body
    except (httpx.TransportError, httpx.InvalidURL) as error:
        raise StorageError(f"cannot read {url}: {error or type(error).__name__}") from error
