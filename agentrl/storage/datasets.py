"""JSONL files in object storage, read through the cache: `s3://BUCKET/PREFIX/tasks.jsonl`."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from agentrl.configs.publish_config import StorageConfig, storage_url
from agentrl.errors import ConfigError, StorageError
from agentrl.storage.folder_cache import BYTES_OF_GB, FolderCache
from agentrl.storage.folder_manifest import MANIFEST, FileFacts, manifest_of, read_manifest
from agentrl.storage.object_store import ObjectStore

FILE = "data.jsonl"


@dataclass(frozen=True, slots=True)
class Dataset:
    """A file in the cache, and what is recorded of it."""

    path: Path
    etag: str
    facts: FileFacts


def is_remote(spec: str) -> bool:
    """Whether a dataset is in object storage."""
    return "://" in spec


def cache_of(config: StorageConfig) -> FolderCache:
    """This host's cache."""
    return FolderCache(config.cache_dir, int(config.cache_gb * BYTES_OF_GB))


@contextmanager
def opened(url: str, config: StorageConfig, field: str) -> Iterator[Dataset]:
    """Yield a file of object storage, which the cache keeps until the block ends.

    The entry belongs to the object's URL, ETag and size, so a changed object is read again. Raises ConfigError for a
    URL that is none or has no object, and StorageError.
    """
    try:
        parent, _, name = storage_url(url).rpartition("/")
    except ValueError as error:
        raise ConfigError(f"{field}: {error}") from None
    store = ObjectStore(parent)
    facts = store.facts(name)
    if facts is None:
        raise ConfigError(f"{field}: {url} does not exist")

    def fill(draft: Path) -> None:
        store.download(name, draft / FILE)
        if store.facts(name) != facts:
            raise StorageError(f"{field}: {url} changed while it was read")
        (draft / MANIFEST).write_bytes(manifest_of(draft).dumps())

    key = hashlib.sha256(f"{url}\n{facts.etag}\n{facts.size_bytes}".encode()).hexdigest()
    with cache_of(config).entry(key, facts.size_bytes, fill) as folder:
        yield Dataset(folder / FILE, facts.etag, read_manifest((folder / MANIFEST).read_bytes()).files[FILE])
