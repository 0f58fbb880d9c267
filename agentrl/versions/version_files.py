"""ASGI: serves version files, `GET /NAME/FILE` and `HEAD`, with ranges and entity tags, to hosts with a read token.

401 no token   403 a token for another version   404 no such file   416 a range behind its end   503 too many readers
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from agentrl.versions.version_manifest import DELTA_NAME, FILE_NAME, NAME, SIDECARS, TENSOR_FILE, VERSION_FILE

PIECE_BYTES = 1 << 20
SEND_TIMEOUT_S = 60.0
"""How long a reader may take for a piece."""
MOST_READERS = 32
RANGE = re.compile(r"bytes=([0-9]{0,18})-([0-9]{0,18})")
Headers = list[tuple[bytes, bytes]]


class Shelf(Protocol):
    """Where version files are: a VersionCache or a WeightsFolder."""

    def locate(self, name: str, file: str) -> Path | None:
        """The path of a version's file; None when it is not there. `name` and `file` are validated."""
        ...


class WeightsFolder:
    """The version folders of a run, as the trainer writes them."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def locate(self, name: str, file: str) -> Path | None:
        """See `Shelf`."""
        path = self._root / name / file
        return path if path.is_file() else None


class VersionFiles:
    """ASGI application below a mount point such as `/versions`: the path it reads ends in `/NAME/FILE`.

    `allowed(token, name)` says whether a bearer token reads a version.
    """

    def __init__(
        self, shelves: Sequence[Shelf], allowed: Callable[[str, str], bool], most_readers: int = MOST_READERS
    ) -> None:
        self._shelves = shelves
        self._allowed = allowed
        self._most_readers = most_readers
        self._readers = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            return
        headers = {key.lower(): value for key, value in scope["headers"]}
        status, path = self._checked(scope, headers)
        if path is None:
            await _refuse(send, status)
        elif self._readers >= self._most_readers:
            await _refuse(send, 503, [(b"retry-after", b"1")])
        else:
            self._readers += 1
            try:
                await _serve(path, scope["method"], headers, send)
            finally:
                self._readers -= 1

    def _checked(self, scope: Any, headers: dict[bytes, bytes]) -> tuple[int, Path | None]:
        """The path that a request may read, or the status that refuses it."""
        if scope["method"] not in ("GET", "HEAD"):
            return 405, None
        name, file = ["", "", *scope["path"].split("/")][-2:]
        if not NAME.fullmatch(name) or not _is_version_file(file):
            return 404, None
        scheme, _, token = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
        if scheme.lower() != "bearer" or not token:
            return 401, None
        if not self._allowed(token, name):
            return 403, None
        found = (shelf.locate(name, file) for shelf in self._shelves)
        path = next((path for path in found if path is not None), None)
        return 404, path


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


def _is_version_file(file: str) -> bool:
    if not FILE_NAME.fullmatch(file):
        return False
    return file == VERSION_FILE or file.endswith((TENSOR_FILE, *SIDECARS)) or DELTA_NAME.fullmatch(file) is not None


async def _serve(path: Path, method: str, headers: dict[bytes, bytes], send: Any) -> None:
    """Send a file, or the part of it that is asked for."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:  # deleted meanwhile
        await _refuse(send, 404)
        return
    try:
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
    finally:
        os.close(descriptor)


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
    about = [*(headers or []), (b"content-length", b"0")]
    await send({"type": "http.response.start", "status": status, "headers": about})
    await send({"type": "http.response.body", "body": b""})
