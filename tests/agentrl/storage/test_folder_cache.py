"""The cache fills an entry once, keeps it within its size, and never deletes one in use."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from agentrl.errors import CacheError, StorageError
from agentrl.storage import folder_cache, stored_folders
from agentrl.storage.folder_cache import LOCK, WRITING, FolderCache
from agentrl.storage.folder_manifest import MANIFEST, manifest_of
from agentrl.storage.object_store import ObjectStore

SIZE = 1000


def filler(calls: list[Path], size: int = SIZE) -> Callable[[Path], None]:
    def fill(draft: Path) -> None:
        calls.append(draft)
        (draft / "file").write_bytes(b"x" * size)
        (draft / MANIFEST).write_bytes(manifest_of(draft).dumps())

    return fill


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def entries(root: Path) -> list[str]:
    return sorted(path.name for path in root.glob("*/"))


def use(cache: FolderCache, name: str, calls: list[Path], used_at: float) -> None:
    with cache.entry(name, SIZE, filler(calls)) as folder:
        os.utime(folder, (used_at, used_at))


def test_an_entry_is_filled_once(root):
    calls: list[Path] = []
    for _ in range(2):
        with FolderCache(root, 10**6).entry("a", SIZE, filler(calls)) as folder:
            assert (folder / "file").stat().st_size == SIZE
    assert len(calls) == 1


def test_a_damaged_entry_is_filled_again(root):
    calls: list[Path] = []
    cache = FolderCache(root, 10**6)
    for change in (b"y" * SIZE, b"", None):
        with cache.entry("a", SIZE, filler(calls)) as folder:
            assert (folder / "file").read_bytes() == b"x" * SIZE
        if change is None:
            (folder / MANIFEST).unlink()
        else:
            (folder / "file").write_bytes(change)
    use(cache, "a", calls, 1)
    assert len(calls) == 4


def test_the_entries_that_were_not_used_for_longest_make_room(root):
    calls: list[Path] = []
    cache = FolderCache(root, 4 * SIZE)
    for name, used_at in (("a", 30), ("b", 10), ("c", 20)):
        use(cache, name, calls, used_at)
    use(cache, "d", calls, 40)
    assert "b" not in entries(root)
    assert "d" in entries(root)
    locks = {path.name.removesuffix(LOCK) for path in root.glob(f"*{LOCK}")}
    assert locks == {*entries(root), WRITING.removesuffix(LOCK)}
    assert sum(path.stat().st_size for path in root.rglob("*") if path.is_file()) <= 4 * SIZE


def test_an_entry_in_use_is_never_deleted(root):
    calls: list[Path] = []
    cache = FolderCache(root, 3 * SIZE)
    with cache.entry("a", SIZE, filler(calls)) as held, cache.entry("b", SIZE, filler(calls)):
        os.utime(held, (1, 1))
        with pytest.raises(StorageError, match=r"no room for 1000 bytes beside the \d+ in use"):
            use(cache, "c", calls, 5)
        assert entries(root) == ["a", "b"]
    use(cache, "c", calls, 5)
    assert "c" in entries(root)


def test_an_entry_larger_than_the_cache_is_refused_before_anything_is_deleted(root):
    calls: list[Path] = []
    cache = FolderCache(root, 2 * SIZE)
    use(cache, "a", calls, 1)
    with (
        pytest.raises(StorageError, match=r"3000 bytes are more than it may hold \(2000; storage\.cache_gb\)"),
        cache.entry("b", 3 * SIZE, filler(calls)),
    ):
        pass
    assert entries(root) == ["a"]


def test_a_full_disk_is_one_error_and_leaves_nothing(root):
    def full(draft: Path) -> None:
        (draft / "file").write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    cache = FolderCache(root, 10**6)
    with pytest.raises(StorageError, match=rf"cache {root}: No space left on device"), cache.entry("a", SIZE, full):
        pass
    assert [path.name for path in root.iterdir()] == [WRITING]
    use(cache, "a", [], 1)


def test_a_disk_that_is_full_for_a_download_is_told_at_once(root, store, folder, monkeypatch):
    def full(source: str, target: str) -> None:
        Path(target).write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    stored_folders.upload(store, folder, "a")
    waits: list[float] = []
    store._pause = waits.append
    monkeypatch.setattr(store._files, "get_file", full)
    with (
        pytest.raises(StorageError, match="No space left on device"),
        stored_folders.cached(store, "a", FolderCache(root, 10**6)),
    ):
        pass
    assert waits == []
    assert [path.name for path in root.iterdir()] == [WRITING]


READER = """
import sys
from pathlib import Path
from agentrl.storage import stored_folders
from agentrl.storage.folder_cache import FolderCache
from agentrl.storage.object_store import ObjectStore

store, cache = ObjectStore(sys.argv[1]), FolderCache(Path(sys.argv[2]), 10**6)
print("asks", flush=True)
with stored_folders.cached(store, "a", cache) as folder:
    print(len((folder / "state" / "0.distcp").read_bytes()), flush=True)
"""


def reader(bucket: str, root: Path) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", READER, bucket, root], text=True, stdout=subprocess.PIPE)


def test_two_processes_that_ask_at_once_download_once(root, s3, bucket, folder):
    stored_folders.upload(ObjectStore(bucket), folder, "a")
    begun, go_on = threading.Event(), threading.Event()

    def wait(request: str) -> None:
        if request.startswith("GET") and request.endswith("0.distcp"):
            begun.set()
            go_on.wait()

    s3.before = wait
    first = reader(bucket, root)
    begun.wait()
    second = reader(bucket, root)
    assert second.stdout.readline() == "asks\n"
    go_on.set()
    outputs = [first.communicate()[0], second.communicate()[0]]
    assert outputs == ["asks\n25600\n", "25600\n"]
    assert len([request for request in s3.requests if request.startswith("GET") and request.endswith("distcp")]) == 1


@pytest.mark.long
def test_a_reader_that_is_killed_while_it_downloads_is_replaced(root, s3, bucket, folder):
    stored_folders.upload(ObjectStore(bucket), folder, "a")
    begun, go_on = threading.Event(), threading.Event()

    def wait(request: str) -> None:
        if request.startswith("GET") and request.endswith("0.distcp"):
            begun.set()
            go_on.wait()

    s3.before = wait
    first = reader(bucket, root)
    begun.wait()
    second = reader(bucket, root)
    assert second.stdout.readline() == "asks\n"
    first.send_signal(signal.SIGKILL)
    first.communicate()
    go_on.set()
    assert second.communicate()[0] == "25600\n"
    assert list(root.glob(".*.part")) == []


def test_an_entry_that_is_present_is_held_without_filling(root):
    cache = FolderCache(root, int(1.5 * 10**3))
    with cache.present("a") as folder:
        assert folder is None
    with cache.entry("a", SIZE, filler([])):
        pass
    with cache.present("a") as folder:
        assert folder == root / "a"
        with pytest.raises(StorageError, match="no room"), cache.entry("b", SIZE, filler([])):
            pass
    (root / "a" / "file").write_bytes(b"other")
    with cache.present("a") as folder:
        assert folder is None


def test_two_readers_hold_an_entry_at_once(root):
    cache = FolderCache(root, 10**6)
    with cache.entry("a", SIZE, filler([])) as one, FolderCache(root, 10**6).entry("a", SIZE, filler([])) as other:
        assert one == other


def test_an_entry_is_discarded_unless_it_is_in_use(root):
    cache = FolderCache(root, 10**6)
    with cache.entry("a", SIZE, filler([])):
        cache.discard("a")
        assert entries(root) == ["a"]
    cache.discard("a")
    cache.discard("a")
    assert entries(root) == []


def test_blocks_of_one_name_do_not_overlap(root):
    inside, most = [], []

    def block():
        with FolderCache(root, 10**6).alone("work"):
            inside.append(1)
            most.append(len(inside))
            inside.pop()

    threads = [threading.Thread(target=block) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] * 8


def test_a_cache_that_cannot_be_used_is_one_error(root):
    root.write_text("a file")
    cache = FolderCache(root, 10**6)
    for block in (cache.entry("a", SIZE, filler([])), cache.alone("a")):
        with pytest.raises(CacheError, match=rf"cache {root}: File exists"), block:
            pytest.fail("entered")


def test_a_lock_that_cannot_be_opened_is_one_error(root):
    cache = FolderCache(root, 10**6)
    use(cache, "a", [], 1)
    (root / f"a{LOCK}").unlink()
    (root / f"a{LOCK}").mkdir()
    for block in (cache.present("a"), cache.alone("a"), cache.entry("a", SIZE, filler([]))):
        with pytest.raises(CacheError, match=rf"cache {root}: Is a directory"), block:
            pytest.fail("entered")
    with pytest.raises(CacheError, match=rf"cache {root}: Is a directory"):
        cache.discard("a")
    assert (root / "a" / "file").exists()


def test_a_fault_while_an_entry_is_compared_frees_the_entry(root):
    def faulty(folder: Path) -> bool:
        raise KeyError(folder.name)

    use(FolderCache(root, 10**6), "a", [], 1)
    cache = FolderCache(root, 10**6, is_sound=faulty)
    for block in (cache.present("a"), cache.entry("a", SIZE, filler([]))):
        with pytest.raises(KeyError), block:
            pytest.fail("entered")
    cache.discard("a")
    assert entries(root) == []


def test_an_entry_that_is_deleted_before_it_is_held_is_filled_again(root, monkeypatch):
    flock = fcntl.flock
    calls: list[Path] = []

    def overtaken(lock: int, how: int) -> None:
        flock(lock, how)
        if how == fcntl.LOCK_SH and len(calls) == 1:  # another process deletes the entry as soon as it may
            shutil.rmtree(root / "a")
            (root / f"a{LOCK}").unlink()

    monkeypatch.setattr(fcntl, "flock", overtaken)
    with FolderCache(root, 10**6).entry("a", SIZE, filler(calls)) as folder:
        assert (folder / "file").read_bytes() == b"x" * SIZE
    assert len(calls) == 2


def test_a_lock_whose_file_was_deleted_while_it_was_waited_for_is_taken_again(root, monkeypatch):
    flock = fcntl.flock
    taken: list[int] = []

    def overtaken(lock: int, how: int) -> None:
        flock(lock, how)
        if how == fcntl.LOCK_EX:
            taken.append(os.fstat(lock).st_ino)
            if len(taken) == 1:
                (root / f"work{LOCK}").unlink()

    monkeypatch.setattr(fcntl, "flock", overtaken)
    with FolderCache(root, 10**6).alone("work"):
        assert taken[1:] == [(root / f"work{LOCK}").stat().st_ino]


def test_the_cache_is_below_the_folder_of_the_environment(tmp_path, monkeypatch):
    for variable, value, folder in (
        ("AGENTRL_CACHE", str(tmp_path / "mine"), tmp_path / "mine" / "storage"),
        ("AGENTRL_CACHE", "", tmp_path / "home" / ".cache" / "agentrl" / "storage"),
    ):
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        monkeypatch.setenv(variable, value)
        with FolderCache(None, 10**6).entry("a", SIZE, filler([])) as found:
            assert found == folder / "a"


def test_a_disk_that_is_full_before_the_cache_gets_room_from_old_entries(root, monkeypatch):
    calls: list[Path] = []
    cache = FolderCache(root, 10**6)
    use(cache, "a", calls, 1)
    use(cache, "b", calls, 2)
    usage = shutil.disk_usage(root)
    monkeypatch.setattr(folder_cache.shutil, "disk_usage", lambda path: usage._replace(free=0))
    use(cache, "c", calls, 3)
    assert entries(root) == ["b", "c"]


def test_a_disk_that_other_files_fill_costs_no_entries(root, monkeypatch):
    cache = FolderCache(root, 10**6)
    use(cache, "a", [], 1)
    usage = shutil.disk_usage(root)
    monkeypatch.setattr(folder_cache.shutil, "disk_usage", lambda path: usage._replace(free=0))
    with cache.entry("b", 10 * SIZE, filler([])):
        assert entries(root) == ["a", "b"]


@pytest.mark.parametrize("at", ["listed", "measured", "sorted"])
def test_an_entry_that_another_process_deletes_meanwhile_makes_room(root, monkeypatch, at):
    """Deletions do not wait for the process that makes room."""
    calls: list[Path] = []
    cache, other = FolderCache(root, 3 * SIZE), FolderCache(root, 3 * SIZE)
    use(cache, "a", calls, 1)
    use(cache, "b", calls, 2)
    deleting = ["a"]

    def then_deleted(call):
        def called(*args, **named):
            answer = call(*args, **named)
            if deleting and Path(args[0]) in (root / "a", root / "a" / "file"):
                other.discard(deleting.pop())
            return answer

        return called

    match at:
        case "listed":
            monkeypatch.setattr(Path, "is_dir", then_deleted(Path.is_dir))
        case "measured":
            monkeypatch.setattr(folder_cache, "_size", then_deleted(folder_cache._size))
        case "sorted":
            monkeypatch.setattr(folder_cache, "_used_at", then_deleted(folder_cache._used_at))
    use(cache, "c", calls, 3)
    assert not deleting
    assert "c" in entries(root)
    assert not (root / f"a{LOCK}").exists()
