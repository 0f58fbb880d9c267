"""Folders that are complete or absent: written beside their place, synced, renamed."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """A temporary folder that becomes `target` when the block ends without an error; an existing one is replaced."""
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        yield staging
        for path in staging.iterdir():
            sync(path)
        sync(staging)
        if target.exists():
            shutil.rmtree(target)
        staging.chmod(0o755)
        staging.rename(target)
        sync(target.parent)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def sync(path: Path) -> None:
    """Flush a file or folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_all_but_newest(folders: list[Path], keep: int) -> None:
    """Delete all but the last `keep` of `folders` (oldest first)."""
    for folder in folders[: max(0, len(folders) - keep)]:
        shutil.rmtree(folder)


def remove_leftovers(parent: Path) -> None:
    """Delete staging folders of a writer that died. Call only while nobody else writes here."""
    for folder in parent.glob(".*-*/"):
        shutil.rmtree(folder)
