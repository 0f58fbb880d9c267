"""The files of a sandbox, as a tar file in memory: nothing is left on a disk when a process is killed."""

from __future__ import annotations

import fcntl
import io
import os
import tarfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import PurePosixPath

from agentrl.errors import UserError

MAX_INPUT_BYTES = 64 * 2**20
WRITABLE, FOLDER = 0o666, 0o777


@contextmanager
def open_files(files: Mapping[str, str | bytes]) -> Iterator[tuple[int, str]]:
    """An open file that holds `files` (relative path → content), and the path of it for processes that inherit it.

    Raises UserError for a path that leads out of the folder, or too many bytes.
    """
    packed = pack(files)
    opened = os.memfd_create("agentrl-sandbox", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with open(opened, "wb", closefd=False) as file:
            file.write(packed)
        fcntl.fcntl(opened, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE)
        yield opened, f"/proc/self/fd/{opened}"
    finally:
        os.close(opened)


def pack(files: Mapping[str, str | bytes]) -> bytes:
    """A tar file whose files and folders everybody may write."""
    packed, left = io.BytesIO(), MAX_INPUT_BYTES
    folders: dict[PurePosixPath, None] = {}
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for name, content in files.items():
            path = PurePosixPath(name)
            if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in name:
                raise UserError(f"files: {name!r} is not a path inside the sandbox's folder")
            data = content.encode(errors="replace") if isinstance(content, str) else content
            left -= len(data)
            if left < 0:
                raise UserError(f"files: more than {MAX_INPUT_BYTES} bytes")
            for parent in [one for one in reversed(path.parents[:-1]) if one not in folders]:
                folders[parent] = None
                tar.addfile(_entry(str(parent), tarfile.DIRTYPE, FOLDER))
            entry = _entry(str(path), tarfile.REGTYPE, WRITABLE)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
    return packed.getvalue()


def _entry(name: str, kind: bytes, mode: int) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.type, entry.mode = kind, mode
    return entry
