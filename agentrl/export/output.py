"""Files and folders that appear complete, under their own name, or not at all. Only their owner may read them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from agentrl import files
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
    _make_parent(path)
    draft = files.draft_of(path)
    files.touch_private(draft)
    try:
        yield draft
        files.sync(draft)
        draft.replace(path)
        files.sync(path.parent)
    finally:
        with suppress(FileNotFoundError):
            draft.unlink()


@contextmanager
def atomic_folder(path: Path, *, force: bool = False) -> Iterator[Path]:
    """Fill the folder that this yields; at the block's end it is durable at `path`. Raises as `atomic_file` does."""
    require_free(path, force=force)
    if path.is_file():
        raise UserError(f"--out: {path} is a file, and a folder is wanted")
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
        raise UserError(f"--out: cannot make {path.parent}: {error.strerror}") from error
