"""ASGI: serves version files, `GET /NAME/FILE` and `HEAD`, with ranges and entity tags, to hosts with a read token.

401 no token   403 a token for another version   404 no such file   416 a range behind its end
503 too many readers, or the file is still being read from elsewhere: ask again

A request for a file that this host is reading waits for it, so that versions flow through a chain of hosts.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from agentrl.versions.version_manifest import DELTA_NAME, FILE_NAME, NAME, SIDECARS, TENSOR_FILE, VERSION_FILE

PIECE_BYTES = 1 << 20
SEND_TIMEOUT_S = 60.0
"""How long a reader may take for a piece."""
MOST_READERS = 32
WAIT_S = 20.0
"""How long a request waits for a file that is being read: less than the time-out of HTTPSource."""
POLL_S = 0.05
TRIES = 3
"""How often a file is looked up that is moved or deleted while it is opened."""
RANGE = re.compile(r"bytes=([0-9]{0,18})-([0-9]{0,18})")
Headers = list[tuple[bytes, bytes]]


class Shelf(Protocol):
    """Where version files are: a VersionCache or a WeightsFolder."""

    def locate(self, name: str, file: str) -> Path | None:
        """The path of a version's file; None when it is not there. `name` and `file` are validated.

        It may wait for the disk, so a thread calls it.
        """
        ...

    def awaits(self, name: str, file: str) -> bool:
        """Whether the file is being read from elsewhere."""
        ...


class WeightsFolder:
    """The version folders of a run, as the trainer writes them."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def locate(self, name: str, file: str) -> Path | None:
        """See `Shelf`."""
        path = self._root / name / file
        return path if path.is_file() else None

    def awaits(self, name: str, file: str) -> bool:
        """See `Shelf`."""
        return False


class VersionFiles:
    """ASGI application below a mount point such as `/versions`: the path it reads ends in `/NAME/FILE`.

    `allowed(token, name)` says whether a bearer token reads a version.
    """

    def __init__(
        self, shelves: Sequence[Shelf], allowed: Callable[[str, str], bool], most_readers: int = MOST_READERS
    ) -> None:
        self._shelves = shelves
        self.allowed = allowed
        self._most_readers = most_readers
        self._readers = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            return
        headers = {key.lower(): value for key, value in scope["headers"]}
        name, file = _named(scope)
        status = self._refusal(scope["method"], name, file, headers)
        if status is None and self._readers >= self._most_readers:
            status = 503
        if status is not None:
            await _refuse(send, status)
            return
        self._readers += 1
        try:
            await self._answer(scope["method"], name, file, headers, send)
        finally:
            self._readers -= 1

    async def locate(self, scope: Any) -> tuple[int, Path | None]:
        """The path of the file that a request may read, after waiting for it if need be; or a status of refusal."""
        name, file = _named(scope)
        headers = {key.lower(): value for key, value in scope["headers"]}
        status = self._refusal("GET", name, file, headers)
        if status is not None:
            return status, None
        return (503 if self._awaits(name, file) else 404), await self._found(name, file)

    def _refusal(self, method: str, name: str, file: str, headers: dict[bytes, bytes]) -> int | None:
        """The status of a request that may not read a file; None for one that may."""
        if method not in ("GET", "HEAD"):
            return 405
        if not NAME.fullmatch(name) or not _is_version_file(file):
            return 404
        scheme, _, token = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
        if scheme.lower() != "bearer" or not token:
            return 401
        return None if self.allowed(token, name) else 403

    async def _answer(self, method: str, name: str, file: str, headers: dict[bytes, bytes], send: Any) -> None:
        """Send a file, after waiting for it if need be."""
        for _ in range(TRIES):
            path = await self._found(name, file)
            if path is None:
                break
            try:
                opened = await asyncio.to_thread(path.open, "rb", 0)
            except FileNotFoundError:  # moved or deleted meanwhile
                continue
            with opened:
                await _serve(opened.fileno(), method, headers, send)
            return
        await _refuse(send, 503 if self._awaits(name, file) else 404)

    async def _found(self, name: str, file: str) -> Path | None:
        """The path of a file; waits while a shelf awaits it. None when it is not there, or did not come in WAIT_S."""
        until = time.monotonic() + WAIT_S
        while True:
            awaited = self._awaits(name, file)  # before the look, so that a file that has just come is found
            path = await asyncio.to_thread(self._located, name, file)
            if path is not None or not awaited or time.monotonic() > until:
                return path
            await asyncio.sleep(POLL_S)

    def _located(self, name: str, file: str) -> Path | None:
        found = (shelf.locate(name, file) for shelf in self._shelves)
        return next((path for path in found if path is not None), None)

    def _awaits(self, name: str, file: str) -> bool:
        return any(shelf.awaits(name, file) for shelf in self._shelves)


class Part(NamedTuple):
    """The bytes of a file that are sent."""

    start: int
    end: int


def part_of(size: int, wanted: str) -> Part | None:
    """The part of a file that a Range header asks for; None when it is behind the file's end.

    The whole file for a header that is absent, asks for several parts, or is not understood.
    """
    match = RANGE.fullmatch(wanted.strip())
    if match is None or match[1] == match[2] == "":
        return Part(0, size)
    if match[1] == "":  # the last bytes
        return Part(max(0, size - int(match[2])), size) if int(match[2]) and size else None
    start, end = int(match[1]), int(match[2]) + 1 if match[2] else size
    if match[2] and end <= start:
        return Part(0, size)
    return Part(start, min(end, size)) if start < size else None


def _named(scope: Any) -> tuple[str, str]:
    """The version and the file at the end of a request's path."""
    name, file = ["", "", *scope["path"].split("/")][-2:]
    return name, file


def _is_version_file(file: str) -> bool:
    if not FILE_NAME.fullmatch(file):
        return False
    return file == VERSION_FILE or file.endswith((TENSOR_FILE, *SIDECARS)) or DELTA_NAME.fullmatch(file) is not None


async def _serve(descriptor: int, method: str, headers: dict[bytes, bytes], send: Any) -> None:
    """Send a file, or the part of it that is asked for."""
    stat = os.fstat(descriptor)
    tag = f'"{stat.st_size:x}-{stat.st_mtime_ns:x}"'.encode()
    wanted = headers.get(b"range", b"") if headers.get(b"if-range", tag) == tag else b""
    part = part_of(stat.st_size, wanted.decode("latin-1"))
    if part is None:
        await _refuse(send, 416, [(b"content-range", f"bytes */{stat.st_size}".encode())])
        return
    about = [(b"etag", tag), (b"accept-ranges", b"bytes"), (b"content-type", b"application/octet-stream")]
    about.append((b"content-length", str(part.end - part.start).encode()))
    is_part = part != Part(0, stat.st_size)
    if is_part:
        about.append((b"content-range", f"bytes {part.start}-{part.end - 1}/{stat.st_size}".encode()))
    await send({"type": "http.response.start", "status": 206 if is_part else 200, "headers": about})
    await _send_part(descriptor, part if method == "GET" else Part(0, 0), send)


async def _send_part(descriptor: int, part: Part, send: Any) -> None:
    """Send bytes of a file, piece by piece; TimeoutError ends a reader that is too slow."""
    at = part.start
    while at < part.end:
        piece = await asyncio.to_thread(os.pread, descriptor, min(PIECE_BYTES, part.end - at), at)
        if not piece:
            raise OSError("a version file became shorter while it was read")
        at += len(piece)
        async with asyncio.timeout(SEND_TIMEOUT_S):
            await send({"type": "http.response.body", "body": piece, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


async def _refuse(send: Any, status: int, headers: Headers | None = None) -> None:
    again = [(b"retry-after", b"1")] if status == 503 else []
    about = [*(headers or []), *again, (b"content-length", b"0")]
    await send({"type": "http.response.start", "status": status, "headers": about})
    await send({"type": "http.response.body", "body": b""})
