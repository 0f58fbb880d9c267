"""Writes a rank's checkpoint files with torch.distributed.checkpoint, and hashes their bytes while they are written.

every rank     bytes ─► HashedFile ─► file       one pass; the file is not read again
rank 0         SHA-256 of all ranks' files, from the results that torch gathers anyway
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

METADATA = ".metadata"
"""The file in which torch describes the tensors of all ranks. It is written under another name and renamed."""


@dataclass(frozen=True)
class HashedResult(WriteResult):
    """A rank's facts of one tensor, with the SHA-256 (hexadecimal) of the rank's files by name."""

    sha256: Mapping[str, str]


class HashedFile:
    """A binary file that is written from its start to its end, and the SHA-256 of its bytes."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._digest = hashlib.sha256()

    def write(self, data: Any) -> int:
        """Append bytes."""
        self._digest.update(data)
        return self._file.write(data)

    def tell(self) -> int:
        """The number of bytes so far."""
        return self._file.tell()

    def flush(self) -> None:
        """Hand the bytes to the system."""
        self._file.flush()

    def fileno(self) -> int:
        """The file's descriptor, for fsync."""
        self._file.flush()
        return self._file.fileno()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def hexdigest(self) -> str:
        """The SHA-256 of the bytes so far, in hexadecimal."""
        return self._digest.hexdigest()


class HashingFiles(FileSystem):
    """torch's file system; remembers the SHA-256 of every file that it writes, by name."""

    def __init__(self) -> None:
        self.sha256: dict[str, str] = {}

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        """Open a file; one that is written is hashed."""
        with super().create_stream(path, mode) as file:
            if mode != "wb":
                yield file
                return
            hashed = HashedFile(cast(BinaryIO, file))
            yield hashed
            self.sha256[Path(path).name] = hashed.hexdigest()


class HashingWriter(FileSystemWriter):
    """Writes a rank's part of a checkpoint. On rank 0, `sha256` has the files of all ranks when the save has ended."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._files = HashingFiles()
        self.fs = self._files
        self.sha256: dict[str, str] = {}

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's tensors; the first result brings the hashes of the rank's files to rank 0."""
        results = super().write_data(plan, planner).wait()
        hashed: list[WriteResult] = [
            HashedResult(one.index, one.size_in_bytes, one.storage_data, {} if k else dict(self._files.sha256))
            for k, one in enumerate(results)
        ]
        done: Future[list[WriteResult]] = Future()
        done.set_result(hashed)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the description of the tensors, on rank 0."""
        super().finish(metadata, results)
        for one in (result for of_rank in results for result in of_rank):
            self.sha256 |= getattr(one, "sha256", {})
        self.sha256[METADATA] = self._files.sha256[f"{METADATA}.tmp"]
