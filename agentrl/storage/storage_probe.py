"""Tries an object storage: writes an object, reads, lists and deletes it."""

from __future__ import annotations

import secrets

from agentrl.errors import StorageError
from agentrl.storage.object_store import ObjectStore

PREFIX = ".agentrl-probe-"


def probe(store: ObjectStore) -> None:
    """Raise StorageError unless the storage can be written, read, listed and deleted from."""
    name = f"{PREFIX}{secrets.token_hex(8)}"
    content = secrets.token_bytes(64)
    store.write(f"{name}/object", content)
    try:
        if store.read(f"{name}/object", len(content)) != content:
            raise StorageError(f"{store.url}: an object that was just written has other content")
        if store.names(name) != ["object"]:
            raise StorageError(f"{store.url}: an object that was just written is not listed")
    finally:
        store.delete(name)
    if store.facts(f"{name}/object") is not None:
        raise StorageError(f"{store.url}: an object that was just deleted is still there")
