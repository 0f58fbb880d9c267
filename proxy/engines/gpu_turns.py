"""Turns on GPUs that engines share with the trainer: release the engines' memory for a step, and take it back.

    release ── grant the turn (store) ──► every engine releases its memory ──► the trainer computes
    publish ── hand it back (store) ────► every engine loads the new version
    reload ─── end it (store) ──────────► every engine loads the run's version

The store decides whose turn it is. Each replica's probes make the engines obey, so any replica ends a turn that its
trainer has not renewed in time.
"""

from __future__ import annotations

import asyncio
import time

from agentrl.domain.schemas import Json
from agentrl.engine.engine_client import Health
from agentrl.errors import RequestError
from agentrl.proxy.engines.engine_state import Engine, EngineState
from agentrl.proxy.engines.pool import EnginePool
from agentrl.proxy.run_store import RunStore
from agentrl.store.training import memory_leases

HEALTH_TIMEOUT_S = 2.0
POLL_S = 0.05


async def release(store: RunStore, pool: EnginePool, epoch: int, lease_s: float) -> Json:
    """Give the trainer of `epoch` the engines' GPU memory for `lease_s`; returns when all engines have released it.

    Asking again extends the time. Raises RequestError 503 while an engine starts, or when one has not released its
    memory after half of the time. Raises FencedError when a newer trainer has started.
    """
    started = time.monotonic()
    starting = await store.write(memory_leases.grant, store.run_id, epoch, lease_s, store.replica)
    if starting:
        raise _not_yet(f"engines are starting: {', '.join(starting)}", "engines_starting")
    await _probe_all(pool)
    while holding := [engine.url for engine in pool.engines if await _may_hold_memory(engine)]:
        if time.monotonic() - started < lease_s / 2:  # another replica may be releasing it just now
            await asyncio.sleep(POLL_S)
            await _probe_all(pool)
            continue
        raise _not_yet(f"engines have not released their memory: {', '.join(holding)}", "memory_not_released")
    return {"epoch": epoch, "lease_s": lease_s, "seconds": time.monotonic() - started, "engines": _states(pool)}


async def reload(store: RunStore, pool: EnginePool, epoch: int) -> Json:
    """End the turn of the trainer of `epoch`, and let every engine load and serve the run's version."""
    started = time.monotonic()
    await store.write(memory_leases.end, store.run_id, epoch, store.replica)
    await _probe_all(pool)
    return {"epoch": epoch, "seconds": time.monotonic() - started, "engines": _states(pool)}


async def _probe_all(pool: EnginePool) -> None:
    await pool.read_fleet()
    await asyncio.gather(*(pool.probe(engine) for engine in pool.engines))


async def _may_hold_memory(engine: Engine) -> bool:
    """Whether an engine has not released its memory. One that does not answer has none, as its process has ended."""
    if engine.state is EngineState.DEAD:
        return await engine.client.health(HEALTH_TIMEOUT_S) is not Health.DEAD
    return engine.state is not EngineState.RELEASED


def _states(pool: EnginePool) -> dict[str, str]:
    return {engine.url: engine.state.value for engine in pool.engines}


def _not_yet(message: str, code: str) -> RequestError:
    return RequestError(503, message, code=code, retry_after_s=1.0)
