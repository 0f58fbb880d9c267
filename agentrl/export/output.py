"""Writes output files and folders atomically, readable by their owner only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from agentrl import files
from agentrl.errors import UserError


def require_free(path: Path, *, force: bool) -> None:
    """Raise UserError when `path` exists and `force` is not set."""
    if path.exists() and not force and not (path.is_dir() and not any(path.iterdir())):
        raise UserError(f"--out: {path} exists; give another path, or --force to replace it")


@contextmanager
def atomic_file(path: Path, *, force: bool = False) -> Iterator[Path]:
    """Yield a draft path; when the block ends, the draft is moved durably to `path`.

    Raises UserError when `path` exists, unless `force` is set, and when its folder is not writable.
    """
    require_free(path, force=force)
    if path.is_dir():
        raise UserError(f"--out: {path} is a folder; give a file")
    _make_parent(path)
    with files.atomic_file(path) as draft:
        yield draft


@contextmanager
def atomic_folder(path: Path, *, force: bool = False) -> Iterator[Path]:
    """Yield a draft folder; when the block ends, it is moved durably to `path`. Raises as `atomic_file` does."""
    require_free(path, force=force)
    if path.is_file():
        raise UserError(f"--out: {path} is a file; give a folder")
    _make_parent(path)
    with files.atomic_folder(path) as draft:
        draft.chmod(0o700)
        yield draft
        for inner in draft.rglob("*"):
            inner.chmod(0o700 if inner.is_dir() else 0o600)


def _make_parent(path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out: cannot create {path.parent}: {error.strerror}") from error
