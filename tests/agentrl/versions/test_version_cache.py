"""The cache of versions: exact whatever was missed, from any source that works, shared by the processes of a host."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentrl.errors import CacheError, StorageError
from agentrl.storage.object_store import ObjectStore
from agentrl.versions import tensor_files, version_cache, version_entries, whole_files
from agentrl.versions.http_source import HTTPSource
from agentrl.versions.version_cache import VersionCache
from agentrl.versions.version_manifest import VersionManifest, named_manifest
from agentrl.versions.version_sources import FolderSource, ObjectSource, Source
from tests.version_folders import Tensors, changed, read_tensors, tensors, write_version

ROOM = 10**9


class Lineage:
    """Versions v1, v2, … below `root`; `anchors` have whole files, all but the first a delta."""

    def __init__(self, root: Path, count: int, anchors: Sequence[int] = (1,), elements: int = 300) -> None:
        rng = np.random.default_rng(count)
        self.root = root
        self.manifests: list[VersionManifest] = []
        self.contents: list[Tensors] = []
        for version in range(1, count + 1):
            content = changed(rng, self.contents[-1]) if self.contents else tensors(rng, elements)
            parent = (self.manifests[-1], self.contents[-1]) if self.contents else None
            whole = version in anchors
            self.manifests.append(write_version(root, f"v{version}-a", content, parent, whole))
            self.contents.append(content)

    def fetch(self, cache: VersionCache, version: int, *sources: Source, **options: Any) -> None:
        """Take a version from the cache and compare every byte of its tensors."""
        manifest = self.manifests[version - 1]
        with cache.whole(manifest.name, sources or [self.copied()], manifest.checksum, **options) as folder:
            assert read_tensors(folder) == {name: new.data for name, new in self.contents[version - 1].items()}
            assert (folder / "config.json").read_bytes() == b"{}"

    def copied(self) -> FolderSource:
        return FolderSource(self.root, in_place=False)


class Counted:
    """A source that counts what is read from it."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.reads: list[str] = []

    def manifest(self, name: str) -> VersionManifest | None:
        return self.source.manifest(name)

    def read(self, name: str, file: str, start: int, end: int) -> Any:
        self.reads.append(f"{name}/{file}")
        return self.source.read(name, file, start, end)


@pytest.fixture
def cache(tmp_path: Path) -> VersionCache:
    return VersionCache(tmp_path / "cache", ROOM)


def entries(tmp_path: Path) -> set[str]:
    return {path.name for path in (tmp_path / "cache").glob("*/")}


def test_a_version_by_its_chain(cache: VersionCache, tmp_path: Path) -> None:
    lineage = Lineage(tmp_path / "weights", 4)
    lineage.fetch(cache, 4)
    assert entries(tmp_path) == {"v1-a.whole", "v2-a.delta", "v3-a.delta", "v4-a.delta", "v4-a.made"}


def test_only_what_is_missing_is_read(cache: VersionCache, tmp_path: Path) -> None:
    lineage = Lineage(tmp_path / "weights", 4)
    source, sizes = Counted(lineage.copied()), list[int]()
    lineage.fetch(cache, 3, source)
    source.reads.clear()
    lineage.fetch(cache, 4, source, received=sizes.append)
    assert sorted(source.reads) == [f"v4-a/delta-0000{n}-of-00002.bin" for n in (1, 2)]
    assert sum(sizes) == lineage.manifests[3].delta.size_bytes
    source.reads.clear()
    lineage.fetch(cache, 4, source)
    assert source.reads == []


def test_a_folder_is_used_in_place(cache: VersionCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lineage = Lineage(tmp_path / "weights", 2, anchors=(1, 2))
    verified = count_verified(monkeypatch)
    for _ in range(2):
        with cache.whole("v2-a", [FolderSource(lineage.root)], lineage.manifests[1].checksum) as folder:
            assert folder == lineage.root / "v2-a"
    assert (verified, entries(tmp_path)) == ([lineage.root / "v2-a"], set())


def test_a_base_is_used_in_place(cache: VersionCache, tmp_path: Path) -> None:
    lineage = Lineage(tmp_path / "weights", 3)
    lineage.fetch(cache, 3, FolderSource(lineage.root))
    assert entries(tmp_path) == {"v2-a.delta", "v3-a.delta", "v3-a.made"}


def test_a_damaged_folder_is_not_used_in_place(cache: VersionCache, tmp_path: Path) -> None:
    lineage = Lineage(tmp_path / "weights", 2, anchors=(1, 2))
    damage(next((lineage.root / "v2-a").glob("*.safetensors")))
    lineage.fetch(cache, 2, FolderSource(lineage.root))
    assert "v2-a.made" in entries(tmp_path)


def count_verified(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    verified: list[Path] = []

    def verify(folder: Path, manifest: VersionManifest) -> None:
        verified.append(folder)
        tensor_files.verify(folder, manifest)

    for module in (version_cache, version_entries):
        monkeypatch.setattr(module, "verify", verify)
    return verified


def damage(path: Path) -> None:
    """Change the last byte of a file."""
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.long
def test_200_versions_with_missed_ones_and_anchors(tmp_path: Path) -> None:
    lineage = Lineage(tmp_path / "weights", 200, anchors=range(1, 201, 20), elements=40)
    rng = np.random.default_rng(0)
    hosts = [VersionCache(tmp_path / f"host{n}", 80_000) for n in range(3)]
    for version in range(1, 201):
        for host in hosts:
            if rng.random() < 0.2 or version == 200:
                source = FolderSource(lineage.root, in_place=bool(rng.random() < 0.5))
                lineage.fetch(host, version, source)
    sizes = [path.stat().st_size for path in (tmp_path / "host0").rglob("*") if path.is_file()]
    assert sum(sizes) < 100_000


def test_the_next_source_is_tried(cache: VersionCache, tmp_path: Path, host: Any) -> None:
    """Absent, without an answer, damaged: the last source has it."""
    lineage = Lineage(tmp_path / "served", 3)
    broken = Lineage(tmp_path / "broken", 3)
    for path in broken.root.rglob("delta*"):
        damage(path)
    gone = HTTPSource("http://127.0.0.1:1/versions", "reads", pause=lambda seconds: None)
    sources = [FolderSource(tmp_path / "none"), gone, broken.copied(), HTTPSource(host.url, "reads")]
    lineage.fetch(cache, 3, *sources)


def test_a_source_with_wrong_deltas_is_passed_over(cache: VersionCache, tmp_path: Path) -> None:
    """Its manifests and files agree, but its deltas do not lead to the version."""
    lineage, other = Lineage(tmp_path / "weights", 2), Lineage(tmp_path / "other", 3)
    wrong = tmp_path / "wrong"
    parent, child = other.manifests[1], lineage.manifests[1]
    write_version(wrong, "v2-a", lineage.contents[1], (lineage.manifests[0], other.contents[1]), whole=False)
    assert parent != child
    lineage.fetch(cache, 2, FolderSource(wrong), lineage.copied())
    assert "v2-a.made" in entries(tmp_path)


def test_a_source_that_states_wrong_sizes_is_passed_over(cache: VersionCache, tmp_path: Path) -> None:
    """There would be no room for such files, which no other source could help."""
    lineage = Lineage(tmp_path / "weights", 1)
    manifest = lineage.manifests[0]
    assert manifest.whole is not None
    wrong = tmp_path / "wrong" / manifest.name
    wrong.mkdir(parents=True)
    about = json.loads(manifest.dumps())
    about["whole"][0][1] = 1 << 49
    (wrong / "version.json").write_text(json.dumps(about))
    lineage.fetch(cache, 1, FolderSource(tmp_path / "wrong", in_place=False), lineage.copied())


def test_whole_files_where_the_chain_is_damaged(cache: VersionCache, tmp_path: Path) -> None:
    lineage = Lineage(tmp_path / "weights", 3, anchors=(1, 3))
    lineage.fetch(cache, 2)
    for path in (lineage.root / "v3-a").glob("delta*"):
        damage(path)
    lineage.fetch(cache, 3)
    assert "v3-a.whole" in entries(tmp_path)


def test_a_version_with_another_checksum(cache: VersionCache, tmp_path: Path) -> None:
    lineage = Lineage(tmp_path / "weights", 1)
    with (
        pytest.raises(StorageError, match="no source has v1-a with the checksum 000"),
        cache.whole("v1-a", [lineage.copied()], "0" * 64),
    ):
        pass


@pytest.mark.parametrize("anchors", [(1,), (1, 2, 3)])
def test_versions_of_another_run_with_the_same_names_are_replaced(
    cache: VersionCache, tmp_path: Path, anchors: Sequence[int]
) -> None:
    other, lineage = Lineage(tmp_path / "other", 4, anchors), Lineage(tmp_path / "weights", 3, anchors)
    other.fetch(cache, 3)
    for version in (3, 1, 2):
        lineage.fetch(cache, version)
    other.fetch(cache, 4)


def test_no_source(cache: VersionCache) -> None:
    with pytest.raises(StorageError, match="no source"), cache.whole("v1-a", [], "0" * 64):
        pass


def test_errors_say_what_each_source_answered(cache: VersionCache, tmp_path: Path) -> None:
    lineage = Lineage(tmp_path / "weights", 1)
    damage(lineage.root / "v1-a" / "model-00001-of-00002.safetensors")
    with (
        pytest.raises(StorageError, match=rf"no source has v1-a/model-00001.*{lineage.root}/v1-a/.* other bytes"),
        cache.whole("v1-a", [lineage.copied()], lineage.manifests[0].checksum),
    ):
        pass
    assert entries(tmp_path) == set()


def test_object_storage(cache: VersionCache, tmp_path: Path) -> None:
    lineage = Lineage(tmp_path / "weights", 3)
    lineage.fetch(cache, 3, ObjectSource(ObjectStore(f"file://{tmp_path}/weights")))


def test_a_host_serves_what_it_read(cache: VersionCache, tmp_path: Path) -> None:
    lineage = Lineage(tmp_path / "weights", 2)
    lineage.fetch(cache, 2)
    assert cache.locate("v2-a", "delta-00001-of-00002.bin") == tmp_path / "cache/v2-a.delta/delta-00001-of-00002.bin"
    assert cache.locate("v1-a", "config.json") == tmp_path / "cache/v1-a.whole/config.json"
    assert cache.locate("v2-a", "version.json") is not None
    assert cache.locate("v2-a", "model-00001-of-00002.safetensors") is None  # made here


def test_a_chain_of_hosts(tmp_path: Path) -> None:
    """A host that reads from another host's cache has the same bytes."""
    lineage = Lineage(tmp_path / "weights", 4, anchors=(1, 3))
    first, second = (VersionCache(tmp_path / name, ROOM) for name in ("first", "second"))
    for version in (1, 4):
        lineage.fetch(first, version)
        lineage.fetch(second, version, Peer(first))


class Peer:
    """Reads what another host's cache serves."""

    def __init__(self, cache: VersionCache) -> None:
        self._cache = cache

    def manifest(self, name: str) -> VersionManifest | None:
        path = self._cache.locate(name, "version.json")
        return None if path is None else named_manifest(path.read_bytes(), name, "peer")

    def read(self, name: str, file: str, start: int, end: int) -> Any:
        path = self._cache.locate(name, file)
        if path is None:
            raise StorageError(f"peer has no {name}/{file}")
        yield path.read_bytes()[start:end]


def test_what_received_raises_ends_the_work(cache: VersionCache, tmp_path: Path) -> None:
    lineage = Lineage(tmp_path / "weights", 2)

    def received(size: int) -> None:
        raise RuntimeError

    with pytest.raises(RuntimeError):
        lineage.fetch(cache, 2, received=received)
    assert entries(tmp_path) == set()
    lineage.fetch(cache, 2)


def test_a_full_disk(cache: VersionCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lineage = Lineage(tmp_path / "weights", 2)
    lineage.fetch(cache, 1)

    def write_at(descriptor: int, start: int, data: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(whole_files, "write_at", write_at)
        with pytest.raises(StorageError, match="No space left on device"):
            lineage.fetch(cache, 2)
    assert "v2-a.made" not in entries(tmp_path)
    assert not list((tmp_path / "cache").glob(".*.part"))
    lineage.fetch(cache, 2)


def test_a_full_disk_is_not_tried_again(cache: VersionCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither by the other route nor by another source."""
    lineage = Lineage(tmp_path / "weights", 2, anchors=(1, 2))
    sources, calls = [Counted(lineage.copied()), Counted(lineage.copied())], list[Path]()

    def verify(folder: Path, manifest: VersionManifest) -> None:
        calls.append(folder)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(version_cache, "verify", verify)
    with pytest.raises(CacheError, match="No space left on device"):
        lineage.fetch(cache, 2, *sources)
    assert len(calls) == 1
    assert sources[1].reads == []


def test_a_failed_file_ends_the_others(cache: VersionCache, tmp_path: Path) -> None:
    lineage = Lineage(tmp_path / "weights", 1)
    failed = threading.Event()

    class Source(Counted):
        def read(self, name: str, file: str, start: int, end: int) -> Any:
            if file == "config.json":
                failed.set()
                raise StorageError("config.json is gone")
            assert failed.wait(60)
            while True:
                yield b""

    with pytest.raises(StorageError, match=r"config\.json is gone"):
        lineage.fetch(cache, 1, Source(lineage.copied()))


@pytest.mark.parametrize("name", ["../v1-a", "weights", "v1-a/..", ""])
def test_other_names_are_refused(cache: VersionCache, tmp_path: Path, name: str) -> None:
    with pytest.raises(StorageError, match="not a version folder's name"), cache.whole(name, [], "0" * 64):
        pass


def test_no_room(tmp_path: Path) -> None:
    lineage = Lineage(tmp_path / "weights", 2)
    size = lineage.manifests[0].whole_bytes or 0
    small = VersionCache(tmp_path / "cache", int(1.5 * size))
    lineage.fetch(small, 1)
    with pytest.raises(StorageError, match="no room"):
        lineage.fetch(small, 2)


def test_old_versions_make_room(tmp_path: Path) -> None:
    lineage = Lineage(tmp_path / "weights", 8)
    small = VersionCache(tmp_path / "cache", int(3.5 * (lineage.manifests[0].whole_bytes or 0)))
    for version in range(1, 9):
        lineage.fetch(small, version)
    assert "v8-a.made" in entries(tmp_path)
    assert "v1-a.whole" not in entries(tmp_path)


@pytest.mark.parametrize("file", ["model-00001-of-00002.safetensors", "version.json"])
def test_an_entry_that_changed_is_read_again(cache: VersionCache, tmp_path: Path, file: str) -> None:
    lineage = Lineage(tmp_path / "weights", 1)
    lineage.fetch(cache, 1)
    damage(tmp_path / "cache" / "v1-a.whole" / file)
    lineage.fetch(cache, 1)


def test_an_entry_is_verified_again_after_a_boot(
    cache: VersionCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lineage = Lineage(tmp_path / "weights", 2)
    lineage.fetch(cache, 2)
    verified = count_verified(monkeypatch)
    lineage.fetch(cache, 2)
    assert verified == []
    boot = tmp_path / "boot_id"
    boot.write_text("another")
    monkeypatch.setattr("agentrl.versions.version_stamps.BOOT_ID", boot)
    lineage.fetch(cache, 2)
    lineage.fetch(cache, 2)
    assert verified == [tmp_path / "cache" / "v2-a.made"]


def test_threads_share_one_read(cache: VersionCache, tmp_path: Path) -> None:
    lineage = Lineage(tmp_path / "weights", 3)
    source, failures = Counted(lineage.copied()), list[BaseException]()

    def fetch() -> None:
        try:
            lineage.fetch(VersionCache(tmp_path / "cache", ROOM), 3, source)
        except BaseException as error:  # noqa: BLE001 - shown by the test
            failures.append(error)

    threads = [threading.Thread(target=fetch) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert len(source.reads) == len(set(source.reads))


def test_two_readers_hold_a_version_at_once(cache: VersionCache, tmp_path: Path) -> None:
    lineage = Lineage(tmp_path / "weights", 1)
    checksum = lineage.manifests[0].checksum
    with (
        cache.whole("v1-a", [lineage.copied()], checksum) as one,
        VersionCache(tmp_path / "cache", ROOM).whole("v1-a", [], checksum) as other,
    ):
        assert one == other


KILLED = """
import os, sys
from pathlib import Path
from agentrl.versions import {module} as module
from agentrl.versions.version_cache import VersionCache
from agentrl.versions.version_sources import FolderSource
real, count = module.{function}, int(sys.argv[3])

def killed(*arguments):
    global count
    count -= 1
    if count < 0:
        os.kill(os.getpid(), 9)
    return real(*arguments)

module.{function} = killed
cache = VersionCache(Path(sys.argv[1]), 10**9)
with cache.whole("v3-a", [FolderSource(Path(sys.argv[2]), in_place=False)], sys.argv[4]):
    print("done")
"""


@pytest.mark.parametrize(
    ("module", "function"),
    [("whole_files", "write_at"), ("version_entries", "write_stamp"), ("version_fetch", "in_threads")],
    ids=["making", "sealing", "reading"],
)
def test_a_process_that_is_killed_leaves_no_half_version(tmp_path: Path, module: str, function: str) -> None:
    lineage = Lineage(tmp_path / "weights", 3)
    script = KILLED.format(module=module, function=function)
    for count in range(4):
        arguments = [str(tmp_path / "cache"), str(lineage.root), str(count), lineage.manifests[2].checksum]
        ended = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, check=False)
        if ended.stdout == b"done\n":
            break
        assert ended.returncode == -signal.SIGKILL, ended.stderr.decode()
    for version in (3, 2, 1):
        lineage.fetch(VersionCache(tmp_path / "cache", ROOM), version)
    assert not list((tmp_path / "cache").glob(".*.part"))


def test_versions_over_http_while_connections_break(tmp_path: Path, host: Any) -> None:
    """Hosts miss versions, connections are cut anywhere, and every byte is that of the version."""
    lineage = Lineage(tmp_path / "served", 30, anchors=(1, 11, 21), elements=5000)
    rng, lock = np.random.default_rng(1), threading.Lock()

    def cut_after(path: str) -> int | None:
        with lock:
            return int(rng.integers(1, 40_000)) if rng.random() < 0.4 else None

    host.break_after = cut_after
    source = HTTPSource(host.url, "reads", pause=lambda seconds: None)
    hosts = [VersionCache(tmp_path / f"host{n}", ROOM) for n in range(2)]
    for version in range(1, 31):
        for cache in hosts:
            if rng.random() < 0.3:
                fetch_in_spite(lineage, cache, version, source)
    assert len(host.requests) > 100


def fetch_in_spite(lineage: Lineage, cache: VersionCache, version: int, source: Source) -> None:
    """Fetch a version, again when connections broke more often in a row than a read bears."""
    for _ in range(20):
        try:
            lineage.fetch(cache, version, source)
        except StorageError:
            continue
        return
    raise AssertionError("the version did not come")


HELD = """
import sys
from pathlib import Path
from agentrl.versions.http_source import HTTPSource
from agentrl.versions.version_cache import VersionCache

def received(size):
    print("received", flush=True)
    sys.stdin.read()

cache = VersionCache(Path(sys.argv[1]), 10**9)
with cache.whole("v3-a", [HTTPSource(sys.argv[2], "reads")], sys.argv[3], received):
    pass
"""


def test_a_process_that_is_killed_while_it_reads(tmp_path: Path, host: Any) -> None:
    """Another process that waits for the same version goes on in its place."""
    lineage = Lineage(tmp_path / "served", 3)
    arguments = [str(tmp_path / "cache"), host.url, lineage.manifests[2].checksum]
    command = [sys.executable, "-c", HELD, *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.read(8) == b"received"
        waiting = threading.Thread(
            target=lineage.fetch,
            args=(VersionCache(tmp_path / "cache", ROOM), 3, HTTPSource(host.url, "reads")),
        )
        waiting.start()
        process.kill()
    waiting.join()
    assert entries(tmp_path) == {"v1-a.whole", "v2-a.delta", "v3-a.delta", "v3-a.made"}
    assert not list((tmp_path / "cache").glob(".*.part"))
