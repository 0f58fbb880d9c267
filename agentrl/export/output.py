"""Files and folders that appear complete, under their own name, or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

from agentrl.errors import UserError


def require_free(path: Path, *, force: bool) -> None:
    """Raise UserError when something is at `path` already and may not be replaced."""
    if path.exists() and not force and not (path.is_dir() and not any(path.iterdir())):
        raise UserError(f"--out: {path} exists; name another place, or give --force to replace it")


@contextmanager
def atomic_file(path: Path, *, force: bool = False) -> Iterator[Path]:
    """Write to the path that this yields; at the block's end the file is durable at `path`.

    Raises UserError when something is there already, unless `force`, and when the folder cannot be written.
    """
    require_free(path, force=force)
    if path.is_dir():
        raise UserError(f"--out: {path} is a folder, and a file is wanted")
    draft = _draft(path)
    try:
        yield draft
        sync(draft)
        draft.replace(path)
        sync(path.parent)
    finally:
        with suppress(FileNotFoundError):
            draft.unlink()


@contextmanager
def atomic_folder(path: Path, *, force: bool = False) -> Iterator[Path]:
    """Fill the folder that this yields; at the block's end it is durable at `path`. Raises as `atomic_file` does."""
    require_free(path, force=force)
    if path.is_file():
        raise UserError(f"--out: {path} is a file, and a folder is wanted")
    draft, old = _draft(path), _draft(path)
    try:
        draft.mkdir()
        yield draft
        for inner in [*draft.rglob("*"), draft]:
            sync(inner)
        if path.exists():
            path.rename(old)
        draft.rename(path)
        sync(path.parent)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def sync(path: Path) -> None:
    """Have the disk hold a file, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _draft(path: Path) -> Path:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out: cannot make {path.parent}: {error.strerror}") from error
    return path.with_name(f".{path.name}.{uuid4().hex[:8]}.part")
