"""A SQLite database as a file: checks its location, creates it, and detects missing parts.

The file is checked before SQLite opens it: SQLite would serve a truncated file until a query reads a missing page, take
an empty file for a new database, and even delete the write-ahead log beside an empty file.

Only the first `Database` of a process on a file checks it. A process that closes any descriptor of a file loses all of
its POSIX locks on it, those of SQLite's connections too. Another process that closes its last connection would then
take itself for the last user, and delete the write-ahead log that this process goes on writing to.
"""

from __future__ import annotations

import contextlib
import os
import re
import sqlite3
import threading
import time
from collections import Counter
from pathlib import Path
from uuid import uuid4

from agentrl.errors import StoreError, UserError
from agentrl.files import touch_private

MAGIC = b"SQLite format 3\0"
_WAL_MAGIC = (0x377F0682, 0x377F0683)
_NETWORK = re.compile(
    r"(fuse\.)?(nfs\d?|cifs|smb\w*|9p|sshfs|ceph\w*|gluster\w*|lustre|beegfs\w*|gpfs|afs|davfs\d?|orangefs|pvfs\d?|gfs\d?"
    r"|ocfs\d?|s3fs|gcsfuse|goofys|mountpoint-s3|blobfuse\d?|rclone|juicefs\w*|seaweedfs)"
)


_users: Counter[Path] = Counter()
_users_lock = threading.Lock()


def begin_use(path: Path) -> None:
    """Count a user of a file in this process; the first one checks it with `require_whole`. Raises StoreError."""
    path = path.resolve()
    with _users_lock:
        if not _users[path]:
            require_whole(path)
        _users[path] += 1


def end_use(path: Path) -> None:
    """Count a user less: its connections are closed."""
    with _users_lock:
        _users[path.resolve()] -= 1


def network_filesystem(path: Path, mounts: str) -> str | None:
    """`TYPE at MOUNTPOINT` when an absolute, resolved path lies on a network file system; `mounts` is /proc/mounts."""
    kind, point = "", Path("/")
    for line in mounts.splitlines():
        _, escaped, found, *_ = [*line.split(), "", "", ""]
        where = Path(re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), escaped))
        if path.is_relative_to(where) and len(where.parts) >= len(point.parts):  # of equal mount points, the last one
            kind, point = found, where
    return f"{kind} at {point}" if _NETWORK.fullmatch(kind) else None


def require_local(path: Path) -> None:
    """Raise UserError for a path on a network file system, where /proc/mounts is readable."""
    try:
        mounts = Path("/proc/mounts").read_text()
    except OSError:
        return
    if found := network_filesystem(path.resolve(), mounts):
        raise UserError(
            f"SQLite does not work on a network file system ({path}: {found}): use a local disk or PostgreSQL"
        )


def create(path: Path) -> None:
    """Create an empty database in WAL mode unless the file exists; several processes may try at once.

    The file appears with its header, so an empty file is always one that lost its content. Only its owner may read it.
    """
    if path.exists():
        return
    draft = path.with_name(f".{path.name}.{uuid4().hex[:8]}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        touch_private(draft)  # SQLite gives the write-ahead log the permissions of the database
        conn = sqlite3.connect(draft)
        conn.execute("PRAGMA journal_mode=WAL")
        conn.close()
        with draft.open("rb") as file:
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):  # another process was first
            os.link(draft, path)
    except (sqlite3.Error, OSError) as error:
        raise StoreError(f"database {path}: cannot be made: {error}") from error
    finally:
        for suffix in ("", "-wal", "-shm", "-journal"):
            with contextlib.suppress(OSError):
                Path(f"{draft}{suffix}").unlink()


def require_whole(path: Path) -> None:
    """Raise StoreError for a file that is empty, not a SQLite database, or truncated. Does not scan it."""
    if not path.exists():
        return
    fault = _fault(path)
    if fault:  # another process may have been in the middle of a checkpoint
        time.sleep(0.1)
        fault = _fault(path)
    if fault:
        advice = "stop everything that uses it and restore a backup made by `agentrl store backup`"
        raise StoreError(f"database {path}: {fault}: {advice}")


def _fault(path: Path) -> str | None:
    with path.open("rb") as file:  # the log first: a checkpoint moves pages from it into the file, never back
        in_log, pages = _committed_in_log(Path(f"{path}-wal"))
        header = file.read(100)
        size = os.fstat(file.fileno()).st_size
    if size == 0:
        return "the file is empty (if it never held a database, remove it)"
    if not header.startswith(MAGIC):
        return "the file is not a SQLite database"
    if len(header) < 100:
        return f"the file is cut off ({size} bytes)"
    page_size = int.from_bytes(header[16:18], "big")
    page_size = 65536 if page_size == 1 else page_size
    if pages == 0:
        if header[24:28] != header[92:96]:  # written by a SQLite that did not count pages
            return None
        pages = int.from_bytes(header[28:32], "big")
    there = size // page_size
    missing = max(0, pages - there) - sum(there < page <= pages for page in in_log)
    return f"the file is cut off: {missing} of its {pages} pages are missing" if missing else None


def _committed_in_log(log: Path) -> tuple[set[int], int]:
    """The numbers of the pages that a write-ahead log has committed, and the number of pages of the database after the
    last commit; (∅, 0) without a commit.
    """
    try:
        file = log.open("rb")
    except FileNotFoundError:
        return set(), 0
    committed: set[int] = set()
    since_commit: list[int] = []
    pages = 0
    with file:
        header = file.read(32)
        if len(header) < 32 or int.from_bytes(header[:4], "big") not in _WAL_MAGIC:
            return committed, pages
        page_size, salts = int.from_bytes(header[8:12], "big"), header[16:24]
        while len(frame := file.read(24)) == 24 and frame[8:16] == salts:
            since_commit.append(int.from_bytes(frame[:4], "big"))
            after = int.from_bytes(frame[4:8], "big")
            file.seek(page_size, os.SEEK_CUR)
            if after:
                committed.update(since_commit)
                since_commit.clear()
                pages = after
    return committed, pages
