"""Files of versions that a cache is still reading. A verified file can be passed on while others are read.

A cache writes `version.json` into its draft first, and gives a file its name when the file is verified.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from agentrl.versions.version_manifest import DELTA_NAME, VERSION_FILE

WHOLE, MADE, DELTA = ".whole", ".made", ".delta"
UNKNOWN = ""
"""The kind of files of a version whose route is not chosen yet."""


class VersionRelay:
    """The versions that this process is reading into the cache below `root`."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._reading: Counter[tuple[str, str]] = Counter()
        self._lock = threading.Lock()

    @contextmanager
    def reading(self, name: str, kind: str = UNKNOWN) -> Iterator[None]:
        """Say while the block runs that files of a version will come."""
        with self._lock:
            self._reading[name, kind] += 1
        try:
            yield
        finally:
            with self._lock:
                self._reading[name, kind] -= 1

    def locate(self, name: str, file: str) -> Path | None:
        """The path of a file that is verified, in a draft of this process or another; None when there is none."""
        for kind in (WHOLE, DELTA):
            for draft in self._root.glob(f".{name}{kind}.*.part"):
                if (path := draft / file).is_file():
                    return path
        return None

    def awaits(self, name: str, file: str) -> bool:
        """Whether a file of a version may come soon."""
        with self._lock:
            kinds = {kind for kind in (UNKNOWN, WHOLE, DELTA) if self._reading[name, kind] > 0}
        known = kinds - {UNKNOWN}
        if file == VERSION_FILE or not known:
            return bool(kinds)
        return (DELTA if DELTA_NAME.fullmatch(file) else WHOLE) in known
