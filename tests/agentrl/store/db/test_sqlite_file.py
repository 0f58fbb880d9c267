"""SQLite files: refused on network file systems, created atomically, and recognised when truncated."""

import shutil
import sqlite3
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from sqlalchemy import text

from agentrl.errors import StoreError, UserError
from agentrl.store import Database
from agentrl.store.db import sqlite_file

MOUNTS = """\
/dev/vda / ext4 rw,relatime 0 0
server:/home /home nfs4 rw,vers=4.2 0 0
/dev/vdb /home/local xfs rw 0 0
//host/share /mnt/with\\040space cifs rw 0 0
me@host: /mnt/ssh fuse.sshfs rw 0 0
/dev/vdc /data ext4 rw 0 0
server:/data /data nfs rw 0 0

"""


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("/srv/a.db", None),
        ("/home/me/a.db", "nfs4 at /home"),
        ("/home/local/a.db", None),
        ("/homely/a.db", None),
        ("/mnt/with space/deep/a.db", "cifs at /mnt/with space"),
        ("/mnt/ssh/a.db", "fuse.sshfs at /mnt/ssh"),
        ("/data/a.db", "nfs at /data"),  # mounted over what was there
    ],
)
def test_network_file_systems_are_recognised(path, found):
    assert sqlite_file.network_filesystem(Path(path), MOUNTS) == found


def test_a_database_on_a_network_file_system_is_refused_in_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(sqlite_file, "network_filesystem", lambda path, mounts: "nfs4 at /home")
    with pytest.raises(UserError, match=r"network file system .*nfs4 at /home.*PostgreSQL") as raised:
        Database(f"sqlite:///{tmp_path}/a.db")
    assert "\n" not in str(raised.value)


def test_the_path_is_checked_after_resolving_links(tmp_path, monkeypatch):
    (tmp_path / "far").mkdir()
    (tmp_path / "near").symlink_to(tmp_path / "far")
    seen = []
    monkeypatch.setattr(sqlite_file, "network_filesystem", lambda path, mounts: seen.append(path))
    sqlite_file.require_local(tmp_path / "near" / "a.db")
    assert seen == [(tmp_path / "far" / "a.db").resolve()]


def test_a_new_file_has_its_header_and_leaves_nothing_else(tmp_path):
    file = tmp_path / "sub" / "a.db"
    sqlite_file.create(file)
    sqlite_file.create(file)
    assert file.read_bytes().startswith(sqlite_file.MAGIC)
    assert list(file.parent.iterdir()) == [file]
    sqlite_file.require_whole(file)


def test_an_unwritable_folder_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="cannot be made"):
        sqlite_file.create(tmp_path / "file" / "a.db")


@pytest.fixture
def filled(tmp_path):
    """A closed database of some hundred pages, without a log."""
    file = tmp_path / "filled.db"
    sqlite_file.create(file)
    conn = sqlite3.connect(file)
    conn.execute("CREATE TABLE t (a BLOB)")
    conn.executemany("INSERT INTO t VALUES (?)", [(bytes(3000),)] * 200)
    conn.commit()
    conn.close()
    assert not Path(f"{file}-wal").exists()
    return file


def cut(file, size):
    with file.open("r+b") as handle:
        handle.truncate(size)


@pytest.mark.parametrize("size", [0, 1, 50, 100, 4095, 4096, 4097, 100_000, -4096, -1])
def test_a_truncated_file_is_refused(filled, size):
    cut(filled, size if size >= 0 else filled.stat().st_size + size)
    before = filled.read_bytes()
    with pytest.raises(StoreError, match=r"(is empty|cut off|not a SQLite database).*agentrl store backup"):
        Database(f"sqlite:///{filled}")
    assert filled.read_bytes() == before


def test_a_complete_file_is_accepted(filled):
    sqlite_file.require_whole(filled)


def test_a_file_of_another_format_is_refused(tmp_path):
    (tmp_path / "a.db").write_text("hello\n" * 1000)
    with pytest.raises(StoreError, match="not a SQLite database"):
        Database(f"sqlite:///{tmp_path}/a.db")


@pytest.fixture
def killed(filled, tmp_path):
    """What a killed process leaves: new pages that are only in the log."""
    conn = sqlite3.connect(filled)
    conn.execute("PRAGMA wal_autocheckpoint=0")
    conn.executemany("INSERT INTO t VALUES (?)", [(bytes(3000),)] * 100)
    conn.commit()
    copy = tmp_path / "killed.db"
    for suffix in ("", "-wal"):
        shutil.copyfile(f"{filled}{suffix}", f"{copy}{suffix}")
    conn.close()
    return copy


def test_pages_in_the_log_count_as_present(killed):
    assert Path(f"{killed}-wal").stat().st_size > 300_000
    sqlite_file.require_whole(killed)
    conn = sqlite3.connect(killed)
    assert conn.execute("SELECT count(*) FROM t").fetchone() == (300,)
    conn.close()


@pytest.mark.parametrize("size", [0, 100, 4096, -4096])
def test_pages_in_neither_file_nor_log_are_missing(killed, size):
    cut(killed, size if size >= 0 else killed.stat().st_size + size)
    log = Path(f"{killed}-wal").read_bytes()
    with pytest.raises(StoreError, match=r"is empty|cut off"):
        Database(f"sqlite:///{killed}")
    assert Path(f"{killed}-wal").read_bytes() == log  # SQLite would have removed it beside an empty file


def test_an_unfinished_commit_in_the_log_does_not_count(killed):
    cut(Path(f"{killed}-wal"), 32 + 10 * (24 + 4096))
    sqlite_file.require_whole(killed)  # as large as it was before that commit


def test_only_the_owner_may_read_a_database_and_its_write_ahead_log(tmp_path):
    path = tmp_path / "a.db"
    database = Database(f"sqlite:///{path}")
    database.upgrade()
    with database.write() as conn:
        conn.exec_driver_sql("CREATE TABLE t (x)")
        modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in tmp_path.iterdir()}
    database.close()
    assert modes == {"a.db": 0o600, "a.db-wal": 0o600, "a.db-shm": 0o600}


def elsewhere(path: Path) -> str:
    """The tables that another process finds, which opens the file and closes it."""
    code = "import sqlite3, sys; c = sqlite3.connect(sys.argv[1]); print(c.execute(sys.argv[2]).fetchall()); c.close()"
    command = [sys.executable, "-c", code, str(path), "SELECT name FROM sqlite_master WHERE name LIKE 'made%'"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_a_second_user_in_the_process_takes_no_locks_from_the_first(tmp_path):
    path = tmp_path / "a.db"
    first = Database(f"sqlite:///{path}")
    first.upgrade()
    for number in range(2):
        with first.write() as conn:
            conn.execute(text(f"CREATE TABLE made{number} (x)"))
        second = Database(f"sqlite:///{path}")
        second.require_current()
        second.close()
        assert f"made{number}" in elsewhere(path)
    first.close()
    first.close()
    path.write_bytes(b"")
    with pytest.raises(StoreError, match="empty"):
        Database(f"sqlite:///{path}")
