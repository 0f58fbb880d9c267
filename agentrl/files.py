"""Atomic files and folders (written under a draft name, synced, renamed), and the ends of logs."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from glob import escape
from pathlib import Path
from uuid import uuid4

TAIL_BYTES = 16384


@contextmanager
def atomic_folder(target: Path, durable: bool = True) -> Iterator[Path]:
    """Yield a draft folder that replaces `target` when the block ends without an error. Raises OSError.

    Without `durable`, its files may be incomplete after a power failure.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = draft_of(target)
    try:
        draft.mkdir()
        yield draft
        settle(draft, target, durable)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


@contextmanager
def atomic_file(target: Path) -> Iterator[Path]:
    """`atomic_folder` for a file that only its owner can read. Files beside the draft whose names begin with the
    draft's (SQLite's journals) are removed.
    """
    draft = draft_of(target)
    touch_private(draft)
    try:
        yield draft
        sync(draft)
        draft.replace(target)
        sync(target.parent)
    finally:
        for left in target.parent.glob(f"{escape(draft.name)}*"):
            left.unlink()


def settle(draft: Path, target: Path, durable: bool = True) -> None:
    """Sync a draft's files, if `durable`, and rename the draft to `target`. Raises OSError.

    An old `target` is renamed and then removed, so programs that have its files open keep reading them. It stays if
    the draft cannot be renamed.
    """
    for inner in [*draft.rglob("*"), draft] if durable else []:
        sync(inner)
    old = draft_of(target)
    try:
        if target.exists():
            target.rename(old)
        try:
            draft.rename(target)
        except BaseException:
            if old.exists():
                old.rename(target)
            raise
        if durable:
            sync(target.parent)
    finally:
        if target.exists():
            shutil.rmtree(old, ignore_errors=True)


def touch_private(path: Path) -> None:
    """Create an empty file with mode 0600. Raises OSError; FileExistsError when it exists."""
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))


def draft_of(target: Path) -> Path:
    """Return a unique hidden name beside `target`."""
    return target.with_name(f".{target.name}.{uuid4().hex[:8]}.part")


def sync(path: Path) -> None:
    """Sync a file or a folder to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_drafts(parent: Path) -> None:
    """Delete the drafts of writers that crashed. Call it only while no other process writes in `parent`."""
    for folder in parent.glob(".*.part/"):
        shutil.rmtree(folder, ignore_errors=True)


def last_lines(path: Path, n: int = 1, start: int = 0) -> list[str]:
    """The last `n` non-empty lines of a log from byte `start` on; none of a file that does not exist."""
    try:
        with path.open("rb") as log:
            log.seek(max(start, log.seek(0, os.SEEK_END) - TAIL_BYTES))
            text = log.read().decode(errors="replace")
    except FileNotFoundError:
        return []
    found = [line.strip() for line in text.splitlines() if line.strip()]
    return found[max(0, len(found) - n) :]
