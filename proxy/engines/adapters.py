"""Versions as low-rank adapters, side by side on an engine: a publish pauses nothing, a call keeps its adapter.

    publish    load v13 ─► new calls name v13; running calls continue with v12
    later      unload v12, once no call can use it any more

The base weights do not change. The engine reports which adapters it has loaded; after a restart it has none.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

from agentrl.engine.chunks import BASE, Adapter
from agentrl.engine.engine_client import EngineClient
from agentrl.errors import EngineError, EngineRejected
from agentrl.proxy.engines.engine_state import Engine
from agentrl.versions.weights_folder import version_of

log = logging.getLogger(__name__)
SLACK_S = 5.0
"""Within this time every replica has noticed that the run has a new version, differences of clocks included."""
UNLOAD_TIMEOUT_S = 5.0


class Adapters:
    """Loads and unloads the run's adapters. The caller holds the engine's lock.

    `oldest_call` returns when the oldest running call of any replica began (seconds since the epoch), or None. It may
    raise StoreError.
    """

    def __init__(self, oldest_call: Callable[[], Awaitable[float | None]]) -> None:
        self._oldest_call = oldest_call

    async def reported(self, engine: Engine, label: int | None) -> int | None:
        """The version that new calls get; None if the engine lacks the base weights or the adapter for it."""
        engine.loaded = await engine.client.adapters()
        if label != BASE or (engine.adapter is not None and engine.adapter.name not in engine.loaded):
            return None
        return engine.version

    async def put(self, engine: Engine, version: int, path: str) -> None:
        """Load the adapter of `version` from `path`, for new calls. On an EngineError the engine is unchanged."""
        adapter = None if version == BASE else Adapter(Path(path).name, version)
        if adapter is not None:
            await _load(engine.client, adapter.name, path)
        engine.version, engine.adapter, engine.folder = version, adapter, str(Path(path).parent)
        engine.seen = engine.changes

    async def retire(self, engine: Engine) -> None:
        """Unload the adapters that no call can use any more. Raises EngineUnavailable, StoreError.

        A call names the adapter that was current when it began, or a later one. So an adapter is out of use when every
        running call began after it was replaced. To unload one in use would block the engine until its calls end.
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
    """Load an adapter on an engine that lacks it. Raises EngineError."""
    if (await client.adapters()).get(name) == path:
        return
    try:
        await client.load_adapter(name, path)
    except EngineRejected:
        if (await client.adapters()).get(name) == path:  # another replica has loaded it
            return
        with suppress(EngineRejected):  # some of its ranks may have loaded it
            await client.unload_adapter(name)
        raise
    if (await client.adapters()).get(name) != path:
        raise EngineError(f"{client.url} does not list adapter {name} after loading it from {path}")


async def _unload(client: EngineClient, name: str) -> None:
    """Unload an adapter from an engine. If a replica with an old view still uses it, a later `retire` unloads it."""
    try:
        async with asyncio.timeout(UNLOAD_TIMEOUT_S):
            await client.unload_adapter(name)
    except (EngineRejected, TimeoutError) as error:  # another replica has unloaded it, or it is in use
        log.info("engine %s did not unload adapter %s: %s", client.url, name, error or "no answer in time")
