"""Version folders that are received piece by piece: gaps, repeats, damage, full disks, two writers, and restarts."""

from __future__ import annotations

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from agentrl.errors import DamagedObject, StorageError
from agentrl.versions import version_uploads
from agentrl.versions.version_manifest import TensorFacts, VersionFile, VersionManifest, manifest_of
from agentrl.versions.version_uploads import Gap, Uploads

NAME, FILE = "v3-abc", "model.safetensors"
DATA = bytes(range(256)) * 40


def manifest(name: str = NAME, data: bytes = DATA) -> VersionManifest:
    tensors = [TensorFacts("w", "F32", (2,), hashlib.sha256(data).hexdigest())]
    files = [VersionFile(FILE, len(data), hashlib.sha256(data).hexdigest())]
    return manifest_of(name, tensors, files, None)


@pytest.fixture
def uploads(tmp_path: Path) -> Uploads:
    return Uploads(tmp_path / "weights")


def test_a_version_appears_when_its_files_have_their_digests(uploads: Uploads, tmp_path: Path) -> None:
    folder = tmp_path / "weights" / NAME
    assert uploads.received(NAME, FILE) == 0
    assert uploads.write(NAME, FILE, 0, DATA[:100]) == 100
    assert (uploads.received(NAME, FILE), folder.exists()) == (100, False)
    again = Uploads(tmp_path / "weights")  # a restart
    assert again.write(NAME, FILE, 100, DATA[100:]) == len(DATA)
    assert not folder.exists()
    for _ in range(2):
        assert again.complete(NAME, manifest().dumps()) == manifest()
    assert (folder / FILE).read_bytes() == DATA
    assert sorted(path.name for path in folder.iterdir()) == [FILE, "version.json"]


def test_a_piece_that_is_repeated_or_early_says_where_to_go_on(uploads: Uploads) -> None:
    uploads.write(NAME, FILE, 0, DATA[:100])
    for start in (0, 50, 101):
        with pytest.raises(Gap, match="has 100 bytes here") as caught:
            uploads.write(NAME, FILE, start, DATA[start:])
        assert caught.value.received == 100
    assert uploads.received(NAME, FILE) == 100


def test_a_damaged_file_is_removed_and_can_be_sent_again(uploads: Uploads, tmp_path: Path) -> None:
    uploads.write(NAME, FILE, 0, DATA[:-1] + b"x")
    with pytest.raises(DamagedObject, match=r"model\.safetensors of v3-abc was damaged on its way"):
        uploads.complete(NAME, manifest().dumps())
    assert uploads.received(NAME, FILE) == 0
    with pytest.raises(DamagedObject, match="was not sent"):
        uploads.complete(NAME, manifest().dumps())
    uploads.write(NAME, FILE, 0, DATA[:7])
    with pytest.raises(DamagedObject, match=f"has 7 of {len(DATA)} bytes"):
        uploads.complete(NAME, manifest().dumps())
    uploads.write(NAME, FILE, 7, DATA[7:])
    uploads.complete(NAME, manifest().dumps())
    assert (tmp_path / "weights" / NAME / FILE).read_bytes() == DATA


def test_a_version_that_was_written_again_replaces_the_old_one(uploads: Uploads, tmp_path: Path) -> None:
    for data in (DATA, DATA[::-1]):
        uploads.write(NAME, FILE, 0, data)
        uploads.complete(NAME, manifest(data=data).dumps())
    assert (tmp_path / "weights" / NAME / FILE).read_bytes() == DATA[::-1]


def test_drafts_of_older_versions_and_unknown_files_are_removed(uploads: Uploads, tmp_path: Path) -> None:
    uploads.write("v2-old", FILE, 0, DATA)
    uploads.write("v4-new", FILE, 0, DATA)
    uploads.write(NAME, "other.json", 0, b"{}")
    uploads.write(NAME, FILE, 0, DATA)
    uploads.complete(NAME, manifest().dumps())
    assert (uploads.received("v2-old", FILE), uploads.received("v4-new", FILE)) == (0, len(DATA))
    assert not (tmp_path / "weights" / NAME / "other.json").exists()


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("v3/../x", FILE),
        ("..", FILE),
        ("x", FILE),
        (NAME, "../x"),
        (NAME, ".hidden"),
        (NAME, ""),
        (NAME, "version.json"),
    ],
)
def test_names_that_are_none_are_refused(uploads: Uploads, tmp_path: Path, name: str, file: str) -> None:
    with pytest.raises(ValueError, match="version folder"):
        uploads.write(name, file, 0, DATA)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("data", [b"", b"{", b"[]", manifest("v4-abc").dumps()], ids=["empty", "cut", "list", "other"])
def test_a_manifest_that_is_none_is_refused(uploads: Uploads, data: bytes) -> None:
    uploads.write(NAME, FILE, 0, DATA)
    with pytest.raises(DamagedObject):
        uploads.complete(NAME, data)
    assert uploads.received(NAME, FILE) == len(DATA)


def test_a_full_disk_leaves_the_file_as_it_was(uploads: Uploads, monkeypatch: pytest.MonkeyPatch) -> None:
    uploads.write(NAME, FILE, 0, DATA[:100])
    write = os.write

    def full(descriptor: int, data: bytes) -> int:
        if len(data) <= 50:
            raise OSError(28, "No space left on device")
        return write(descriptor, data[: len(data) - 50])

    with monkeypatch.context() as patch:
        patch.setattr(version_uploads.os, "write", full)
        with pytest.raises(StorageError, match="No space left on device"):
            uploads.write(NAME, FILE, 100, DATA[100:])
    assert uploads.received(NAME, FILE) == 100
    assert uploads.write(NAME, FILE, 100, DATA[100:]) == len(DATA)


def test_of_two_writers_of_a_piece_one_wins(uploads: Uploads, tmp_path: Path) -> None:
    def send(start: int) -> int:
        try:
            return Uploads(tmp_path / "weights").write(NAME, FILE, start, DATA[start : start + 1000])
        except Gap:
            return 0

    with ThreadPoolExecutor() as threads:
        for start in range(0, len(DATA), 1000):
            written = [size for size in threads.map(send, [start] * 4) if size]
            assert written == [min(start + 1000, len(DATA))]
    uploads.complete(NAME, manifest().dumps())
