"""Folders that are complete or absent (written beside their place, synced, renamed), and files of one owner."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4


@contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """A draft that becomes `target`, durably, when the block ends without an error; an existing one is replaced.

    Raises OSError when that cannot be.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = draft_of(target)
    try:
        draft.mkdir()
        yield draft
        settle(draft, target)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def settle(draft: Path, target: Path) -> None:
    """Sync what is in a draft, then give it its name. The old one is renamed away first, not emptied: who has its files
    open keeps them. Raises OSError when that cannot be."""
    for inner in [*draft.rglob("*"), draft]:
        sync(inner)
    old = draft_of(target)
    try:
        if target.exists():
            target.rename(old)
        draft.rename(target)
        sync(target.parent)
    finally:
        shutil.rmtree(old, ignore_errors=True)


def touch_private(path: Path) -> None:
    """Make an empty file that only its owner may read and write. Raises OSError, FileExistsError when it is there."""
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))


def draft_of(target: Path) -> Path:
    """A hidden name beside `target` that nobody else has."""
    return target.with_name(f".{target.name}.{uuid4().hex[:8]}.part")


def sync(path: Path) -> None:
    """Have the disk hold a file, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_drafts(parent: Path) -> None:
    """Delete what writers that died left. Call only while nobody else writes here."""
    for folder in parent.glob(".*.part/"):
        shutil.rmtree(folder, ignore_errors=True)
