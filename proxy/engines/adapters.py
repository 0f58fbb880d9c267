"""Versions as low-rank adapters, side by side on an engine: nothing is paused, a call ends on the one it began with.

    publish    load v13 ─► new calls name v13; those under way go on with v12
    later      unload v12, once no call can use it any more

The base weights below stay as they are. What is loaded under which name, the engine says: a restarted one has nothing.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

from agentrl.engine.sglang_client import BASE, Adapter, EngineClient
from agentrl.errors import EngineError, EngineRejected
from agentrl.proxy.engines.engine_state import Engine
from agentrl.weights_folder import version_of

log = logging.getLogger(__name__)
SLACK_S = 5.0
"""All replicas have noticed within this time that the run has moved on, whatever their clocks say."""
UNLOAD_TIMEOUT_S = 5.0


class Adapters:
    """Loads and unloads the run's adapters. Each engine's lock is held by the caller.

    `oldest_call` tells when the oldest call under way began, at any replica (seconds since the epoch); None when there
    is none. It may raise StoreError.
    """

    def __init__(self, oldest_call: Callable[[], Awaitable[float | None]]) -> None:
        self._oldest_call = oldest_call

    async def reported(self, engine: Engine, label: int | None) -> int | None:
        """The version that an engine gives to new calls, as long as it can: with the weights and adapter it needs."""
        engine.loaded = await engine.client.adapters()
        if label != BASE or (engine.adapter is not None and engine.adapter.name not in engine.loaded):
            return None
        return engine.version

    async def put(self, engine: Engine, version: int, path: str) -> None:
        """Give new calls `version`, whose adapter is in `path`. Raises EngineError; the engine is then as it was."""
        adapter = None if version == BASE else Adapter(Path(path).name, version)
        if adapter is not None:
            await _load(engine.client, adapter.name, path)
        engine.version, engine.adapter, engine.folder = version, adapter, str(Path(path).parent)
        engine.reported = False

    async def retire(self, engine: Engine) -> None:
        """Unload what no call can still use. Raises EngineUnavailable, StoreError.

        A call names what new calls were given when it began, or later. So an adapter is out of use when all calls under
        way began after it had been replaced. Unloading one in use would wait for its calls, and keep others waiting.
        """
        in_folder = (name for name, path in engine.loaded.items() if str(Path(path).parent) == engine.folder)
        ours = {name: version_of(name) for name in in_folder}
        older = {name for name, version in ours.items() if version is not None and version < (engine.version or BASE)}
        now = time.time()
        engine.replaced_at = {name: engine.replaced_at.get(name, now) for name in older}
        ripe = {name: at + SLACK_S for name, at in engine.replaced_at.items() if at + SLACK_S < now}
        if not ripe:
            return
        oldest = await self._oldest_call()
        for name, free_at in ripe.items():
            if oldest is None or oldest > free_at:
                await _unload(engine.client, name)


async def _load(client: EngineClient, name: str, path: str) -> None:
    """Have the engine load an adapter, unless it has it. Raises EngineError."""
    if (await client.adapters()).get(name) == path:
        return
    try:
        await client.load_adapter(name, path)
    except EngineRejected:
        if (await client.adapters()).get(name) == path:  # another replica was faster
            return
        with suppress(EngineRejected):  # one of several ranks may have it
            await client.unload_adapter(name)
        raise
    if (await client.adapters()).get(name) != path:
        raise EngineError(f"{client.url} does not list adapter {name} after loading it from {path}")


async def _unload(client: EngineClient, name: str) -> None:
    """Have the engine forget an adapter. It does so later if a replica that slept through the change still uses it."""
    try:
        async with asyncio.timeout(UNLOAD_TIMEOUT_S):
            await client.unload_adapter(name)
    except (EngineRejected, TimeoutError) as error:  # another replica was faster; it is in use
        log.info("engine %s did not unload adapter %s: %s", client.url, name, error or "no answer in time")
