"""Releases the memory of an engine whose GPUs the trainer shares, so that a release never kills the engine.

`agentrl.store.training.memory_leases` says whose turn it is. `Updates.bring` makes each engine obey, at any replica.
"""

from __future__ import annotations

from agentrl.engine.engine_client import Memory, PauseMode
from agentrl.errors import EngineRejected
from agentrl.proxy.engines.engine_state import Engine
from agentrl.proxy.engines.version_delivery import EngineBusy


async def release_memory(engine: Engine, mode: PauseMode, *, was_paused: bool) -> None:
    """Pause an engine as a publish does, and free the memory of its weights and its KV cache.

    The caller has claimed it. Raises EngineBusy when a request still keeps the engine from being idle (such as one
    whose grammar is being compiled), since a release would kill it; the engine then continues, unless it `was_paused`.
    Raises EngineError.
    """
    client, has_cache = engine.client, engine.memory is Memory.HELD
    if has_cache:
        if mode == "abort":
            await client.pause("abort")
        await client.pause("retract")  # also after `abort`: the last batch leaves the cache
        try:
            await client.flush_cache()
        except EngineRejected as error:
            if not was_paused:
                await client.continue_generation()
            raise EngineBusy(f"{engine.url} cannot release its memory yet: {error}") from error
    await client.release_memory(cache=has_cache)
    engine.memory = Memory.RELEASED
