"""Checks the tensors of a weight folder against the trainer's checksum before an engine loads them."""

from __future__ import annotations

import asyncio
from pathlib import Path

from agentrl.errors import StoreError
from agentrl.versions.weights_folder import TENSORS, checksum

Signature = tuple[str, int, int]


class WeightFolders:
    """Checks each folder once in this process, and again when its file `tensors` has changed."""

    def __init__(self, tensors: str = TENSORS) -> None:
        self._tensors = tensors
        self._checksums: dict[int, tuple[Signature, str]] = {}

    async def checked(self, version: int, path: str, expected: str | None) -> str:
        """`path`. Raises StoreError when its tensors have another checksum than `expected`.

        A file that this machine does not see passes: engines may share a disk with the trainer, and an engine that
        cannot read the file reports that.
        """
        file = Path(path) / self._tensors
        try:
            stat = file.stat()
            signature = (path, stat.st_mtime_ns, stat.st_size)
            known = self._checksums.get(version)
            if known is None or known[0] != signature:
                known = (signature, await asyncio.to_thread(_checksum, file))
                self._checksums[version] = known
        except OSError:
            return path
        if expected is not None and known[1] != expected:
            raise StoreError(
                f"version {version} is not loaded: the tensors in {file} are not those that the trainer recorded "
                f"(checksum {known[1][:12]}, recorded {expected[:12]}); restart the trainer, which writes the "
                "folder of its newest checkpoint again"
            )
        return path


def _checksum(file: Path) -> str:
    """The checksum of a file; for a damaged file one that no tensors have."""
    try:
        return checksum(file)
    except ValueError:
        return "damaged"
