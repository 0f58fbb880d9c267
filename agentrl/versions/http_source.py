"""Version files of another host, over HTTP: `URL/NAME/FILE` with ranges. A broken read goes on where it stopped."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import httpx

from agentrl.versions.version_manifest import VersionManifest

TRIES = 5
"""Connections in a row that may break without a byte."""
PAUSE_S = 0.2
"""Wait before the second try; the next ones wait twice as long each."""
PIECE_BYTES = 1 << 20
TIMEOUT = httpx.Timeout(60.0, connect=5.0)
BUSY = (429, 502, 503, 504)


class _Broken(Exception):
    """The connection broke, or the server is busy: another try may help."""


class HTTPSource:
    """Version folders that another host serves below `url`. `token` is sent as a bearer token."""

    def __init__(self, url: str, token: str, pause: Callable[[float], None] = time.sleep) -> None:
        self._url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {token}", "Accept-Encoding": "identity"}
        self._pause = pause

    def __str__(self) -> str:
        return self._url

    def manifest(self, name: str) -> VersionManifest | None:
        """See `Source`."""
        raise NotImplementedError

    def read(self, name: str, file: str, start: int, end: int) -> Iterator[bytes]:
        """See `Source`."""
        raise NotImplementedError
