"""Version files of another host, over HTTP: `URL/NAME/FILE` with ranges. A broken read goes on where it stopped."""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable, Iterator
from functools import cache

import httpx

from agentrl.errors import DamagedObject, StorageError
from agentrl.versions.version_manifest import MANIFEST_BYTES, VERSION_FILE, VersionManifest, named_manifest

TRIES = 5
"""Connections in a row that may break before WINDOW_BYTES came."""
PAUSE_S = 0.2
"""Wait before the second try; the next ones wait twice as long each, but LONGEST_PAUSE_S at most."""
LONGEST_PAUSE_S = 2.0
BUSY_TRIES = 20
"""Answers in a row that ask to try again, because the host has too many readers or is reading the file itself."""
WINDOW_BYTES = 1 << 20
WINDOW_S = 60.0
"""A server that needs longer for WINDOW_BYTES is too slow."""
TIMEOUT = httpx.Timeout(30.0, connect=5.0)
BUSY = (429, 502, 503, 504)


class _Broken(Exception):
    """The connection broke: another try may help."""


class _Busy(Exception):
    """The server asks to try again."""


class HTTPSource:
    """Version folders that another host serves below `url`. `token` is sent as a bearer token."""

    def __init__(
        self,
        url: str,
        token: str,
        pause: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {token}", "Accept-Encoding": "identity"}
        self._pause = pause
        self._clock = clock

    def __str__(self) -> str:
        return self._url

    def manifest(self, name: str) -> VersionManifest | None:
        """See `Source`."""
        pieces: list[bytes] = []
        try:
            for piece in self._pieces(name, VERSION_FILE, 0, None):
                pieces.append(piece)
        except FileNotFoundError:
            return None
        return named_manifest(b"".join(pieces), name, f"{self}/{name}")

    def read(self, name: str, file: str, start: int, end: int) -> Iterator[bytes]:
        """See `Source`."""
        try:
            yield from self._pieces(name, file, start, end)
        except FileNotFoundError:
            raise StorageError(f"{self}/{name}/{file} does not exist") from None

    def _pieces(self, name: str, file: str, start: int, end: int | None) -> Iterator[bytes]:
        """A file's bytes, over as many connections as needed; `end` is None for a file of at most MANIFEST_BYTES.

        Raises StorageError, and FileNotFoundError when the server does not have the file.
        """
        url, at, breaks, busy, came = f"{self}/{name}/{file}", start, 0, 0, 0
        since = self._clock()
        while True:
            try:
                for piece in self._connection(url, at, end):
                    at, came = at + len(piece), came + len(piece)
                    yield piece
                    if came >= WINDOW_BYTES:
                        since, came, breaks, busy = self._clock(), 0, 0, 0
                    elif self._clock() - since > WINDOW_S:
                        raise StorageError(f"{url} is too slow: {came} bytes in {WINDOW_S:.0f} s")
                return
            except _Broken as error:
                breaks += 1
                if breaks == TRIES:
                    raise StorageError(f"cannot read {url}: {error}") from error
            except _Busy as error:
                busy += 1
                if busy == BUSY_TRIES:
                    raise StorageError(f"cannot read {url}: {error}") from error
            self._pause(min(LONGEST_PAUSE_S, PAUSE_S * 2 ** (breaks + busy - 1)))
            since = self._clock()

    def _connection(self, url: str, at: int, end: int | None) -> Iterator[bytes]:
        """The bytes from `at` on that one connection gives. Raises _Broken when it breaks before `end`."""
        if end is not None and at >= end:
            return
        headers = self._headers | {"Range": f"bytes={at}-{'' if end is None else end - 1}"}
        try:
            with (
                httpx.Client(timeout=TIMEOUT, trust_env=False, verify=_tls()) as http,
                http.stream("GET", url, headers=headers) as answer,
            ):
                stop = _expected(url, answer, at, end)
                for piece in answer.iter_raw():
                    if at + len(piece) > stop:
                        raise DamagedObject(f"{url} has more bytes than it should")
                    at += len(piece)
                    yield piece
        except (httpx.TransportError, httpx.InvalidURL) as error:
            raise _Broken(str(error) or type(error).__name__) from error
        if at < stop:
            raise _Broken(f"the connection ended at byte {at} of {stop}")


@cache
def _tls() -> ssl.SSLContext:
    """The certificates that are trusted. Reading them takes longer than a small file."""
    return httpx.create_ssl_context()


def _expected(url: str, answer: httpx.Response, at: int, end: int | None) -> int:
    """Where the bytes of an answer end. Raises _Busy, StorageError and FileNotFoundError for other answers."""
    status = answer.status_code
    if status in BUSY:
        raise _Busy(f"it answered {status}")
    if status == 404:
        raise FileNotFoundError(url)
    if status not in (200, 206) or answer.headers.get("Content-Encoding", "identity") != "identity":
        raise StorageError(f"cannot read {url}: it answered {status}")
    if status == 206:
        first, _, size = answer.headers.get("Content-Range", "").removeprefix("bytes ").partition("/")
        if not first.startswith(f"{at}-") or not (size.isascii() and size.isdecimal() and len(size) < 20):
            raise StorageError(f"cannot read {url}: it answered with another range than was asked for")
        total = int(size)
    elif at == 0:
        length = answer.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdecimal() and len(length) < 20):
            raise StorageError(f"cannot read {url}: it did not state a length")
        total = int(length)
    else:
        raise StorageError(f"cannot read {url}: it does not support ranges")
    if total < (end or 0) or (end is None and total > MANIFEST_BYTES):
        raise DamagedObject(f"{url} has {total} bytes")
    return total if end is None else end
