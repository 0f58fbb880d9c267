"""Folders in object storage, complete or absent.

    FILES are written ──► MANIFEST is written ──► the folder exists ──► MANIFEST is deleted ──► FILES are deleted

A writer or a deleter that is killed leaves a folder without a manifest, which does not exist for readers. A reader
compares every file with the manifest, so it fails while another folder is written under the key.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from agentrl.errors import DamagedObject, StorageError
from agentrl.files import atomic_folder
from agentrl.storage.folder_cache import FolderCache
from agentrl.storage.folder_manifest import MANIFEST, MANIFEST_BYTES, FolderManifest, manifest_of, read_manifest
from agentrl.storage.object_store import ObjectStore


def upload(store: ObjectStore, folder: Path, key: str) -> None:
    """Write a folder, unless the storage has its content. Raises StorageError, and OSError for an unreadable file."""
    manifest = manifest_of(folder)
    if store.read(f"{key}/{MANIFEST}", MANIFEST_BYTES) == manifest.dumps():
        return
    store.delete(f"{key}/{MANIFEST}")
    for name in manifest.files:
        store.upload(folder / name, f"{key}/{name}")
    store.write(f"{key}/{MANIFEST}", manifest.dumps())


def is_complete(store: ObjectStore, key: str) -> bool:
    """Whether the storage has a folder with a manifest. Its files are not read. Raises StorageError."""
    try:
        return find(store, key) is not None
    except DamagedObject:
        return False


def find(store: ObjectStore, key: str) -> FolderManifest | None:
    """The manifest of a folder; None when there is no complete folder. Raises DamagedObject and StorageError."""
    data = store.read(f"{key}/{MANIFEST}", MANIFEST_BYTES)
    try:
        return None if data is None else read_manifest(data)
    except DamagedObject as error:
        raise DamagedObject(f"{store.url}/{key}: {error}") from error


def download(store: ObjectStore, key: str, target: Path) -> None:
    """Copy a folder to `target`, which appears whole. Raises DamagedObject and StorageError."""
    manifest = _required(store, key)
    try:
        with atomic_folder(target) as draft:
            _fill(store, key, manifest, draft)
    except OSError as error:
        raise StorageError(f"cannot write {target}: {error.strerror}") from error


@contextmanager
def cached(store: ObjectStore, key: str, cache: FolderCache) -> Iterator[Path]:
    """Yield a folder in the cache, which keeps it until the block ends. Raises DamagedObject and StorageError."""
    manifest = _required(store, key)

    def fill(draft: Path) -> None:
        _fill(store, key, manifest, draft)
        (draft / MANIFEST).write_bytes(manifest.dumps())

    with cache.entry(manifest.digest, manifest.size_bytes, fill) as folder:
        yield folder


def delete(store: ObjectStore, key: str) -> None:
    """Delete a folder; its manifest first."""
    store.delete(f"{key}/{MANIFEST}")
    store.delete(key)


def _required(store: ObjectStore, key: str) -> FolderManifest:
    manifest = find(store, key)
    if manifest is None:
        raise DamagedObject(f"{store.url}/{key} has no {MANIFEST}: it was never completely written")
    return manifest


def _fill(store: ObjectStore, key: str, manifest: FolderManifest, draft: Path) -> None:
    """Copy the files of a folder into `draft` and compare them."""
    for name in manifest.files:
        (draft / name).parent.mkdir(parents=True, exist_ok=True)
        store.download(f"{key}/{name}", draft / name)
        try:
            manifest.check_file(draft, name)
        except DamagedObject as error:
            raise DamagedObject(f"{store.url}/{key}: {error}") from error
