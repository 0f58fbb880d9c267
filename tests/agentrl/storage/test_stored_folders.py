"""A folder in the storage is complete or absent, whatever happens to its writer, and readers get its exact bytes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from agentrl.errors import DamagedObject, StorageError
from agentrl.storage import stored_folders
from agentrl.storage.folder_cache import FolderCache
from agentrl.storage.folder_manifest import MANIFEST
from agentrl.storage.object_store import ObjectStore

KEY = "run/checkpoints/step-000001-a"


def content(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


@pytest.fixture
def cache(tmp_path: Path) -> FolderCache:
    return FolderCache(tmp_path / "cache", 10**6)


def test_an_uploaded_folder_is_downloaded_unchanged(store, folder, tmp_path, cache):
    assert not stored_folders.is_complete(store, KEY)
    stored_folders.upload(store, folder, KEY)
    assert stored_folders.is_complete(store, KEY)
    stored_folders.download(store, KEY, tmp_path / "back")
    assert content(tmp_path / "back") == content(folder)
    with stored_folders.cached(store, KEY, cache) as found:
        assert content(found) == content(folder)


def test_a_folder_is_written_once(bucket, s3, folder):
    store = ObjectStore(bucket)
    stored_folders.upload(store, folder, KEY)
    s3.requests.clear()
    stored_folders.upload(store, folder, KEY)
    assert [request for request in s3.requests if not request.startswith(("GET", "HEAD"))] == []


def test_a_deleted_folder_is_gone(store, folder):
    stored_folders.upload(store, folder, KEY)
    stored_folders.upload(store, folder, f"{KEY}b")
    stored_folders.delete(store, KEY)
    stored_folders.delete(store, KEY)
    assert store.names("run/checkpoints") == [f"{Path(KEY).name}b"]


KILLED = """
import os, signal, sys
from pathlib import Path
from agentrl.storage import stored_folders
from agentrl.storage.object_store import ObjectStore

upload, done = ObjectStore.upload, []
def upload_then_die(self, source, key):
    upload(self, source, key)
    done.append(key)
    if len(done) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
ObjectStore.upload = upload_then_die
stored_folders.upload(ObjectStore(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
"""


def test_a_writer_that_is_killed_leaves_no_folder_and_the_next_completes_it(url, folder, tmp_path):
    done = subprocess.run([sys.executable, "-c", KILLED, url, folder, KEY], env=dict(os.environ))
    assert done.returncode == -signal.SIGKILL
    store = ObjectStore(url)
    assert len(store.names(KEY)) == 2
    with pytest.raises(DamagedObject, match=rf"{KEY} has no {MANIFEST}: it was never completely written"):
        stored_folders.download(store, KEY, tmp_path / "back")
    assert not (tmp_path / "back").exists()
    stored_folders.upload(store, folder, KEY)
    stored_folders.download(store, KEY, tmp_path / "back")
    assert content(tmp_path / "back") == content(folder)


@pytest.mark.parametrize("name", ["state/0.distcp", MANIFEST])
def test_a_changed_byte_in_the_storage_is_refused(store, folder, tmp_path, cache, name):
    stored_folders.upload(store, folder, KEY)
    data = bytearray(store.read(f"{KEY}/{name}", 10**6))
    data[len(data) // 2] ^= 1
    store.write(f"{KEY}/{name}", bytes(data))
    with pytest.raises(DamagedObject, match=KEY):
        stored_folders.download(store, KEY, tmp_path / "back")
    with pytest.raises(DamagedObject, match=KEY), stored_folders.cached(store, KEY, cache):
        pass
    assert not (tmp_path / "back").exists()
    assert sorted(path.name for path in (tmp_path / "cache").glob("*/")) == []
    assert list(tmp_path.glob(".*.part")) == []


def test_an_absent_file_is_refused(store, folder, tmp_path):
    stored_folders.upload(store, folder, KEY)
    store.delete(f"{KEY}/meta.json")
    with pytest.raises(StorageError, match=r"meta\.json"):
        stored_folders.download(store, KEY, tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_a_damaged_manifest_is_replaced_by_the_next_upload(store, folder, tmp_path):
    stored_folders.upload(store, folder, KEY)
    store.write(f"{KEY}/{MANIFEST}", b"{")
    stored_folders.upload(store, folder, KEY)
    stored_folders.download(store, KEY, tmp_path / "back")
    assert content(tmp_path / "back") == content(folder)


def test_a_folder_with_other_content_replaces_the_one_before(store, folder, tmp_path):
    stored_folders.upload(store, folder, KEY)
    (folder / "meta.json").write_text("[1]")
    stored_folders.upload(store, folder, KEY)
    stored_folders.download(store, KEY, tmp_path / "back")
    assert content(tmp_path / "back") == content(folder)
