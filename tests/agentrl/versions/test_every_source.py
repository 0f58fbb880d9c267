"""What every source of version files does: a folder, object storage, HTTP, and memory that hosts share."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from agentrl.errors import DamagedObject, StorageError
from agentrl.storage.object_store import ObjectStore
from agentrl.versions.http_source import HTTPSource
from agentrl.versions.transports import memory_windows, mooncake_source, nixl_source, window_answer
from agentrl.versions.transports.memory_windows import WindowFiles, Windows
from agentrl.versions.transports.nixl_source import NIXLSource
from agentrl.versions.version_cache import VersionCache
from agentrl.versions.version_manifest import VERSION_FILE, VersionManifest
from agentrl.versions.version_sources import PART_BYTES, FolderSource, ObjectSource, Source
from tests import fake_nixl
from tests.mooncake_stores import mooncake_place, stored_copy
from tests.version_folders import read_tensors, tensors, write_version

NAME, FILE = "v1-a", "model-00001-of-00002.safetensors"
KINDS = ("folder", "storage", "http", "nixl", "mooncake")
VALUES = tensors(np.random.default_rng(0), 50_000)


@dataclass
class Place:
    """A source, and what a test does to it. `publish` copies a version folder into it."""

    source: Source
    publish: Callable[[Path], None]
    dies: bool = True
    die: Callable[[], None] = lambda: None
    """Let the next reads end in the middle of a file, where it `dies`."""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "served"


@pytest.fixture(params=KINDS)
def place(request: pytest.FixtureRequest, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.setattr(mooncake_source, "CHUNK_BYTES", 64 << 10)
    if request.param == "folder":
        return Place(FolderSource(root), lambda folder: None, dies=False)
    if request.param == "storage":
        target = tmp_path / "stored"
        copies = lambda folder: shutil.copytree(folder, target / folder.name)  # noqa: E731
        return Place(ObjectSource(ObjectStore(f"file://{target}")), copies, dies=False)
    if request.param == "http":
        host = request.getfixturevalue("host")
        source = HTTPSource(host.url, "reads", pause=lambda seconds: None)
        return Place(source, lambda folder: None, die=lambda: setattr(host, "break_after", lambda path: 10))
    if request.param == "nixl":
        host = request.getfixturevalue("host")
        for module in (nixl_source, memory_windows, window_answer):
            monkeypatch.setattr(module, "WINDOW_BYTES", 64 << 10)
        network = fake_nixl.install(monkeypatch)
        host.answer = WindowFiles(host.files, Windows())
        return Place(
            NIXLSource(host.url, "reads"),
            lambda folder: None,
            dies=not fake_nixl.REAL,
            die=lambda: setattr(network, "dies_after", network.reads + 2),
        )
    stored = mooncake_place(request, monkeypatch, tmp_path.name)
    return Place(stored.source, stored.publish, stored.master is not None, stored.die)


@pytest.fixture
def made(place: Place, root: Path) -> VersionManifest:
    manifest = write_version(root, NAME, VALUES)
    place.publish(root / NAME)
    return manifest


def read(source: Source, start: int, end: int, file: str = FILE) -> bytes:
    return b"".join(source.read(NAME, file, start, end))


def test_a_manifest(place: Place, made: VersionManifest) -> None:
    assert place.source.manifest(NAME) == made
    assert place.source.manifest("v2-b") is None


def test_whole_files(place: Place, made: VersionManifest, root: Path) -> None:
    assert made.whole is not None
    for file in made.whole:
        assert read(place.source, 0, file.size_bytes, file.name) == (root / NAME / file.name).read_bytes()


@pytest.mark.parametrize(
    ("start", "end"),
    [(0, 1), (7, 7), (5, 100), (65_530, 65_542), (65_536, 131_072), (1, 200_001)],
    ids=["first", "none", "inside a part", "over a boundary", "a part", "several parts"],
)
def test_ranges(place: Place, made: VersionManifest, root: Path, start: int, end: int) -> None:
    assert read(place.source, start, end) == (root / NAME / FILE).read_bytes()[start:end]


def test_pieces_are_bounded(place: Place, made: VersionManifest, root: Path) -> None:
    pieces = list(place.source.read(NAME, FILE, 0, (root / NAME / FILE).stat().st_size))
    assert all(0 < len(piece) <= PART_BYTES for piece in pieces)


def test_a_file_that_is_not_there(place: Place, made: VersionManifest) -> None:
    with pytest.raises(StorageError, match=r"v1-a/other\.json"):
        read(place.source, 0, 5, "other.json")


def test_more_than_the_file_has(place: Place, made: VersionManifest, root: Path) -> None:
    with pytest.raises(StorageError, match=f"{NAME}/{FILE}"):
        read(place.source, 0, (root / NAME / FILE).stat().st_size + 1)


def test_a_manifest_of_another_version(place: Place, root: Path) -> None:
    write_version(root, "v3-c", VALUES)
    shutil.copytree(root / "v3-c", root / NAME)
    place.publish(root / NAME)
    with pytest.raises(DamagedObject, match=r"is that of v3-c"):
        place.source.manifest(NAME)


def test_a_damaged_manifest(place: Place, root: Path) -> None:
    write_version(root, NAME, VALUES)
    (root / NAME / VERSION_FILE).write_bytes(b"{}")
    place.publish(root / NAME)
    with pytest.raises(DamagedObject, match=NAME):
        place.source.manifest(NAME)


def test_the_string_names_no_secret(place: Place) -> None:
    assert "reads" not in str(place.source)


def test_a_cache_reads_from_it(place: Place, made: VersionManifest, tmp_path: Path) -> None:
    source = FolderSource(place.source.root, in_place=False) if isinstance(place.source, FolderSource) else place.source
    with VersionCache(tmp_path / "cache", 1 << 30).whole(NAME, [source], made.checksum) as folder:
        assert read_tensors(folder) == {name: value.data for name, value in VALUES.items()}


@pytest.fixture
def dying(place: Place) -> Place:
    if not place.dies:
        pytest.skip("a test cannot end the real package")
    return place


ENDED = pytest.mark.parametrize("place", ["http", "nixl", "mooncake"], indirect=True)
"""Sources that can end in the middle of a file."""


@ENDED
def test_a_source_that_dies_in_the_middle(dying: Place, made: VersionManifest, root: Path) -> None:
    dying.die()
    with pytest.raises(StorageError, match=f"{NAME}/{FILE}"):
        read(dying.source, 0, (root / NAME / FILE).stat().st_size)


@ENDED
def test_the_next_source_is_read_after_one_that_died(dying: Place, made: VersionManifest, tmp_path: Path) -> None:
    other = tmp_path / "other"
    stored_copy(tmp_path / "served" / NAME, other)
    dying.die()
    sources = [dying.source, FolderSource(other, in_place=False)]
    with VersionCache(tmp_path / "cache", 1 << 30).whole(NAME, sources, made.checksum) as folder:
        assert read_tensors(folder) == {name: value.data for name, value in VALUES.items()}
