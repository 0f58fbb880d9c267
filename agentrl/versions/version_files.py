"""ASGI: serves version files, `GET /NAME/FILE` and `HEAD`, with ranges and entity tags."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol


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
        raise NotImplementedError


class VersionFiles:
    """ASGI application below a mount point such as `/versions`: the path it reads ends in `/NAME/FILE`.

    `allowed(token, name)` says whether a bearer token reads a version.
    """

    def __init__(self, shelves: Sequence[Shelf], allowed: Callable[[str, str], bool]) -> None:
        self._shelves = shelves
        self._allowed = allowed

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request."""
        raise NotImplementedError
