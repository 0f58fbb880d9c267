"""Hosts that read a version from a host that is reading it itself."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from agentrl.errors import StorageError
from agentrl.versions import version_files
from agentrl.versions.http_source import HTTPSource
from agentrl.versions.version_cache import VersionCache
from agentrl.versions.version_manifest import VERSION_FILE, VersionManifest
from agentrl.versions.version_sources import FolderSource, Source
from tests.agentrl.versions.conftest import TOKEN, Host
from tests.version_folders import Tensors, changed, read_tensors, tensors, write_version

ROOM = 10**9
WAIT_S = 30.0


class Gated:
    """A source whose file `late` comes when `gate` is set, or never when `fails` is."""

    def __init__(self, source: Source, late: str) -> None:
        self.source, self.late = source, late
        self.gate, self.asked = threading.Event(), threading.Event()
        self.fails = False
        self.reads: list[str] = []

    def manifest(self, name: str) -> VersionManifest | None:
        return self.source.manifest(name)

    def read(self, name: str, file: str, start: int, end: int) -> Iterator[bytes]:
        self.reads.append(file)
        if file == self.late:
            self.asked.set()
            assert self.gate.wait(WAIT_S)
            if self.fails:
                raise StorageError(f"{name}/{file} broke")
        return self.source.read(name, file, start, end)


class Received:
    """Counts the bytes that a fetch has read."""

    def __init__(self) -> None:
        self.bytes = 0
        self.some = threading.Event()

    def __call__(self, size: int) -> None:
        self.bytes += size
        if self.bytes:
            self.some.set()


class Run:
    """Two versions of a run below `root`: v1 whole, v2 a delta."""

    def __init__(self, root: Path) -> None:
        rng = np.random.default_rng(3)
        first = tensors(rng)
        second = changed(rng, first)
        one = write_version(root, "v1-a", first)
        self.manifests = {"v1-a": one, "v2-a": write_version(root, "v2-a", second, (one, first), whole=False)}
        self.contents: dict[str, Tensors] = {"v1-a": first, "v2-a": second}
        self.source = FolderSource(root, in_place=False)

    def fetch(
        self, cache: VersionCache, name: str, *sources: Source, received: Callable[[int], None] = lambda size: None
    ) -> None:
        with cache.whole(name, sources, self.manifests[name].checksum, received) as folder:
            assert read_tensors(folder) == {tensor: new.data for tensor, new in self.contents[name].items()}


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path / "weights")


@contextmanager
def serving(cache: VersionCache) -> Iterator[HTTPSource]:
    host = Host(cache)
    try:
        yield HTTPSource(host.url, TOKEN)
    finally:
        host.stop()


def file_of(manifest: VersionManifest) -> str:
    """The last of the version's files that are read."""
    files = manifest.whole or (manifest.delta.files if manifest.delta else ())
    return files[-1].name


@pytest.mark.parametrize("name", ["v1-a", "v2-a"])
def test_files_pass_through_a_chain_of_hosts_before_the_first_host_has_them_all(
    run: Run, tmp_path: Path, name: str
) -> None:
    caches = [VersionCache(tmp_path / f"host{n}", ROOM) for n in range(3)]
    gated, received = Gated(run.source, file_of(run.manifests[name])), Received()
    with ThreadPoolExecutor() as threads, serving(caches[0]) as first, serving(caches[1]) as second:
        fetches: list[Future[None]] = [threads.submit(run.fetch, caches[0], name, gated)]
        assert gated.asked.wait(WAIT_S)
        fetches.append(threads.submit(run.fetch, caches[1], name, first))
        fetches.append(threads.submit(run.fetch, caches[2], name, second, received=received))
        assert received.some.wait(WAIT_S)
        assert not any(fetch.done() for fetch in fetches)
        gated.gate.set()
        for fetch in fetches:
            fetch.result(WAIT_S)
    assert len(gated.reads) == len(set(gated.reads)), "each file leaves the origin once"


def test_a_host_turns_to_its_next_source_when_the_host_before_it_fails(run: Run, tmp_path: Path) -> None:
    caches = [VersionCache(tmp_path / f"host{n}", ROOM) for n in range(2)]
    gated, received = Gated(run.source, file_of(run.manifests["v1-a"])), Received()
    gated.fails = True
    with ThreadPoolExecutor() as threads, serving(caches[0]) as first:
        failing = threads.submit(run.fetch, caches[0], "v1-a", gated)
        assert gated.asked.wait(WAIT_S)
        other = threads.submit(run.fetch, caches[1], "v1-a", first, run.source, received=received)
        assert received.some.wait(WAIT_S)
        gated.gate.set()
        with pytest.raises(StorageError, match="broke"):
            failing.result(WAIT_S)
        other.result(WAIT_S)


async def test_a_file_that_does_not_come_in_time_can_be_asked_for_again(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(version_files, "WAIT_S", 0.0)
    cache = VersionCache(tmp_path / "host", ROOM)
    late = file_of(run.manifests["v1-a"])
    gated = Gated(run.source, late)
    with ThreadPoolExecutor() as threads:
        fetch = threads.submit(run.fetch, cache, "v1-a", gated)
        assert gated.asked.wait(WAIT_S)
        assert cache.awaits("v1-a", late)
        assert not cache.awaits("v1-a", "delta-00001-of-00002.bin")
        assert not cache.awaits("v2-a", VERSION_FILE)
        assert await status_of(cache, f"/v1-a/{late}") == 503
        assert await status_of(cache, "/v2-a/version.json") == 404
        gated.gate.set()
        fetch.result(WAIT_S)
    assert not cache.awaits("v1-a", late)
    assert await status_of(cache, f"/v1-a/{late}") == 200


async def status_of(cache: VersionCache, path: str) -> int:
    found: list[int] = []

    async def send(message: dict[str, object]) -> None:
        if message["type"] == "http.response.start":
            found.append(int(str(message["status"])))

    scope = {"type": "http", "method": "HEAD", "path": path, "headers": [(b"authorization", b"Bearer x")]}
    await version_files.VersionFiles([cache], lambda token, name: True)(scope, None, send)
    return found[0]
