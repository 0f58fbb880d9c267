"""A manifest names a folder's bytes; one that is damaged, or leads out of its folder, is refused."""

from __future__ import annotations

import json

import pytest

from agentrl.errors import DamagedObject
from agentrl.storage.folder_manifest import MANIFEST, FileFacts, FolderManifest, manifest_of, read_manifest


def test_a_manifest_comes_back_and_accepts_its_folder(folder):
    manifest = manifest_of(folder)
    (folder / MANIFEST).write_bytes(manifest.dumps())
    assert read_manifest((folder / MANIFEST).read_bytes()) == manifest == manifest_of(folder)
    assert sorted(manifest.files) == ["empty", "meta.json", "state/0.distcp"]
    assert manifest.size_bytes == 25602
    manifest.check(folder)


@pytest.mark.parametrize(
    ("content", "said"),
    [(None, "cannot be read"), ("{}\n", "has 3 bytes, not 2"), ("[]", "has the SHA-256")],
    ids=["absent", "longer", "changed"],
)
def test_a_changed_file_is_named(folder, content, said):
    manifest = manifest_of(folder)
    if content is None:
        (folder / "meta.json").unlink()
    else:
        (folder / "meta.json").write_text(content)
    with pytest.raises(DamagedObject, match=rf"meta\.json {said}"):
        manifest.check(folder)


def test_every_change_of_a_manifest_is_noticed(folder):
    data = bytearray(manifest_of(folder).dumps())
    for position in range(0, len(data), 7):
        changed = data.copy()
        changed[position] ^= 1
        with pytest.raises(DamagedObject, match="damaged"):
            read_manifest(bytes(changed))


@pytest.mark.parametrize("name", ["../out", "/etc/passwd", "a/../../b", MANIFEST])
def test_a_path_out_of_the_folder_is_refused(name):
    with pytest.raises(DamagedObject, match="is not a file of the folder"):
        read_manifest(FolderManifest({name: FileFacts(1, "00")}).dumps())


@pytest.mark.parametrize(
    "data",
    [b"", b"\xff", b"[]", b"{}", b"[" * 100_000, json.dumps({"format": 1, "files": [1]}).encode()],
    ids=["empty", "not text", "a list", "no files", "deep", "no facts"],
)
def test_an_invalid_manifest_is_refused(data):
    with pytest.raises(DamagedObject):
        read_manifest(data)
