"""A host's versions: their whole files, and the deltas that it read. Processes of the host share them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from agentrl.versions.version_sources import Source


class VersionCache:
    """Versions below `root`, with at most `limit_bytes`."""

    def __init__(self, root: Path, limit_bytes: int) -> None:
        self._root = root
        self._limit_bytes = limit_bytes

    @contextmanager
    def whole(
        self, name: str, sources: Sequence[Source], checksum: str, received: Callable[[int], None] = lambda size: None
    ) -> Iterator[Path]:
        """Yield a folder with the verified whole files of a version, which stays until the block ends.

        `received` is called with the bytes of each piece that was read; what it raises ends the work. Raises
        StorageError when no source has the version, all have failed, or the cache has no room.
        """
        yield self._root
        raise NotImplementedError

    def locate(self, name: str, file: str) -> Path | None:
        """The path of a version's file that this host can serve to others; None when it has none."""
        raise NotImplementedError
