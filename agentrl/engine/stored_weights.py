"""An engine on a host without the run's folder gets versions from object storage when a proxy tells it to load them.

    POST /update_weights_from_disk {"model_path": "/shared/runs/math/weights/v12-ID", …}
        ├─ the host has the folder ──► SGLang, unchanged
        └─ it has not: URL/v12-ID ──► cache ──► SGLang, with the cache's folder as model_path

The cache keeps the folder until SGLang has answered.
"""

from __future__ import annotations

import asyncio
import json
import socket
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path, PurePosixPath
from typing import Any

from pydantic import ValidationError

from agentrl.configs.publish_config import StorageConfig
from agentrl.configs.section import Section
from agentrl.engine.prepared.asgi_bodies import MOST_BYTES, answer_json, read_body, replay, sized
from agentrl.errors import StorageError
from agentrl.storage import stored_folders
from agentrl.storage.datasets import cache_of
from agentrl.storage.object_store import ObjectStore
from agentrl.versions.weights_folder import version_of

STORED_WEIGHTS = "AGENTRL_STORED_WEIGHTS"
"""Variable with a `StoredWeights` as JSON, for the process of SGLang's server."""
PATH = "/update_weights_from_disk"


class StoredWeights(Section):
    """Where an engine finds a run's versions: below `url`, by the names of their folders."""

    url: str
    storage: StorageConfig


class FetchesWeights:
    """ASGI middleware: copies a version that is not on this host before SGLang loads it."""

    def __init__(self, app: Any, *, weights: StoredWeights) -> None:
        self._app = app
        self._store = ObjectStore(weights.url)
        self._cache = cache_of(weights.storage)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer 400 as SGLang does when the version cannot be copied."""
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] != PATH:
            await self._app(scope, receive, send)
            return
        body = await read_body(receive, MOST_BYTES)
        if body is None:
            await _refuse(send, f"the body is larger than {MOST_BYTES} bytes")
            return
        name = _absent_version(body)
        async with AsyncExitStack() as stack:
            if name is not None:
                held = ExitStack()
                stack.push_async_callback(asyncio.to_thread, held.close)
                try:
                    folder = await asyncio.to_thread(self._enter, held, name)
                except StorageError as error:
                    await _refuse(send, f"host {socket.gethostname()} has no folder of {name}, and: {error}")
                    return
                body = json.dumps(json.loads(body) | {"model_path": str(folder)}).encode()
            await self._app(sized(scope, body), replay(body, receive), send)

    def _enter(self, held: ExitStack, name: str) -> Path:
        return held.enter_context(stored_folders.cached(self._store, name, self._cache))


def stored_weights(text: str) -> StoredWeights:
    """The value of the variable. Raises ValueError."""
    try:
        return StoredWeights.model_validate_json(text)
    except ValidationError as error:
        raise ValueError(f"{STORED_WEIGHTS}: {error}") from None


def _absent_version(body: bytes) -> str | None:
    """The name of the version's folder, when the body names one that this host has not."""
    try:
        path = json.loads(body)["model_path"]
    except (ValueError, KeyError, TypeError, RecursionError):  # the engine answers what it cannot read
        return None
    if not isinstance(path, str) or Path(path).is_dir():
        return None
    name = PurePosixPath(path).name
    return None if version_of(name) is None else name


async def _refuse(send: Any, message: str) -> None:
    await answer_json(send, 400, {"success": False, "message": message})
