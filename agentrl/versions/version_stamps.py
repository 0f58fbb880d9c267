"""Stamps of verified folders: a folder is not hashed again while its files are as they were when it was verified.

A stamp has the boot of the host and each file's size, time and number. After a power failure the boot differs, so the
folder is verified again.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from agentrl.files import draft_of

STAMP = ".stamp"
STAMP_BYTES = 64 << 20
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def stamp_of(folder: Path, names: list[str]) -> bytes:
    """The stamp of a folder's files as they are. Raises OSError."""
    facts = []
    for name in sorted(names):
        stat = (folder / name).stat()
        facts.append((name, stat.st_size, stat.st_mtime_ns, stat.st_ino))
    return msgspec.json.encode({"boot": _boot(), "files": facts})


def write_stamp(path: Path, stamp: bytes) -> None:
    """Write a stamp, which readers see whole or not at all. Raises OSError."""
    draft = draft_of(path)
    draft.write_bytes(stamp)
    draft.replace(path)


def is_stamped(path: Path, stamp: bytes) -> bool:
    """Whether the stamp at `path` is this one."""
    try:
        return path.stat().st_size <= STAMP_BYTES and path.read_bytes() == stamp
    except OSError:
        return False


def _boot() -> str:
    """A value that changes with each boot; of this process alone where the host has none."""
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return f"process {os.getpid()}"
