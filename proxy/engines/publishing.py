"""Publishes a weight version, to a share of the engines at once, so that the others serve, and moves the run to it.

PENDING ─ every serving engine has loaded it ─► PUBLISHED
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from agentrl.configs.run_config import RunConfig
from agentrl.domain.schemas import Json, VersionState
from agentrl.errors import EngineError, FencedError, RequestError, StoreError
from agentrl.proxy.engines.engine_state import Engine, EngineState
from agentrl.proxy.engines.pool import EnginePool
from agentrl.proxy.engines.tensor_transfer import Broadcast
from agentrl.proxy.engines.version_delivery import BY_FOLDER, Delivery, Loaded, RecordedFolder
from agentrl.proxy.run_store import RunStore
from agentrl.store import evaluation_episodes, runs
from agentrl.store.training import memory_leases, publishes, trainer_epochs

log = logging.getLogger(__name__)
SHARE = 4
"""At most one serving engine in SHARE is updated at once, but at least one."""


async def publish(
    store: RunStore, pool: EnginePool, version: int, epoch: int | None = None, delivery: Delivery = BY_FOLDER
) -> Json:
    """Bring every engine to `version`, then move the run to it. Publishing twice is harmless.

    `at_once` says how many are updated at once. A slow engine delays the run's move, not the other engines.

    An engine that fails is ejected; any replica's pool updates it to the run's version when it answers again.
    After a StoreError no further engine is updated; those under way finish, and the publish can be repeated.

    Raises StoreError, and RequestError: 404 for an unknown version, 409 for a rolled-back one, 503 when no engine took
    it, or when a trainer of another epoch has its turn on the engines' GPUs. The publish ends the turn of `epoch`.
    Raises FencedError when a trainer newer than `epoch` has started: before any engine is touched, or, like after any
    StoreError, when those under way have finished.
    """
    if epoch is not None:
        await store.write(trainer_epochs.check_epoch, store.run_id, epoch)
    row = await store.read(runs.version, store.run_id, version)
    if row is None:
        raise RequestError(404, f"run {store.run_name} has no version {version}", code="version_not_found")
    if row.state == VersionState.ROLLED_BACK:
        raise RequestError(409, f"version {version} was rolled back", code="version_rolled_back")
    if not await store.write(memory_leases.hand_back, store.run_id, epoch, version):
        message = f"version {version} is not published: a trainer computes on the engines' GPUs"
        raise RequestError(503, message, code="memory_leased", retry_after_s=1.0)
    delivery = replace(delivery, folder=RecordedFolder(row.path, row.checksum))
    async with pool.update_lock:
        started = time.time()
        loaded, problems = await _load_all(pool, version, epoch, delivery)
        if not loaded:
            message = f"no engine took version {version}: {problems[-1] if problems else 'there is none'}"
            raise RequestError(503, message, code="publish_failed", retry_after_s=1.0)
        facts = {
            "version": version,
            "stall_s": {url: each.stall_s for url, each in loaded.items()},
            "transport": {url: each.transport for url, each in loaded.items()},
            "verified": {url: each.verified for url, each in loaded.items()},
            "unverified": {url: why for url, each in loaded.items() if (why := _unverified(delivery, each))},
            "bytes": delivery.n_bytes,
            "bytes_per_s": _rate(delivery.n_bytes, time.time() - started),
        }
        await store.write(publishes.complete, store.run_id, version, epoch, facts, started)
    return facts


async def _load_all(
    pool: EnginePool, version: int, epoch: int | None, delivery: Delivery
) -> tuple[dict[str, Loaded], list[EngineError]]:
    """Load `version` into the engines, `at_once` of them at a time; what was loaded, by URL, and what failed."""
    loaded: dict[str, Loaded] = {}
    problems: list[EngineError] = []
    faults: list[StoreError] = []
    waiting = deque(pool.engines)

    async def load(engine: Engine) -> None:
        try:
            loaded[engine.url] = await pool.load(engine, version, delivery)
        except EngineError as error:
            problems.append(error)
            await pool.reports.lost(engine, error)

    async def work() -> None:
        while waiting:
            try:
                _check_epoch(pool, epoch)
                await load(waiting.popleft())
            except StoreError as error:
                faults.append(error)
                waiting.clear()

    async with asyncio.TaskGroup() as group:
        for _ in range(at_once(pool.engines, delivery, pool.updates_at_once)):
            group.create_task(work())
    if faults:
        raise faults[0]
    return loaded, problems


def _check_epoch(pool: EnginePool, epoch: int | None) -> None:
    """Raise FencedError when a newer trainer is known to have started: it publishes a version of its own."""
    if epoch is not None and pool.trainer_epoch > epoch:
        raise FencedError(f"trainer epoch {epoch} is over: epoch {pool.trainer_epoch} has started")


def at_once(engines: Sequence[Engine], delivery: Delivery, limit: int) -> int:
    """How many engines are updated at once: `limit` at most, and one in SHARE of those that serve, so that most serve.

    No share is kept where none serves, because the trainer has their memory. Members of a broadcast are updated
    together, whatever the limit.
    """
    if isinstance(delivery.transfer, Broadcast):
        return len(engines)
    if any(engine.state is EngineState.RELEASED for engine in engines):
        return limit
    return max(1, min(limit, sum(engine.state is EngineState.SERVING for engine in engines) // SHARE))


async def resume(store: RunStore, pool: EnginePool, config: RunConfig) -> None:
    """Finish a publish that a dead replica began: publish the newest version that is durable but not published.

    Skips a version that the trainer holds back for an evaluation: its publish has not begun.
    """
    version = await store.read(publishes.pending, store.run_id)
    if version is not None and not await store.read(evaluation_episodes.paused, store.run_id, version, config):
        log.info("finishing the publish of version %d", version)
        await publish(store, pool, version)


def _unverified(delivery: Delivery, loaded: Loaded) -> str | None:
    """Why no tensor of an engine was compared with the trainer's; None if some were."""
    if loaded.verified:
        return None
    if loaded.transport == "adapter":
        return "no whole weights were loaded"
    if not delivery.digests:
        return "no digests were sent: publish.verify is off, or the engines are not on a CPU"
    return "an engine of several ranks, or one that keeps none of the tensors as they were sent"


def _rate(n_bytes: int | None, seconds: float) -> float | None:
    """Bytes per second over the whole publish."""
    return n_bytes / seconds if n_bytes and seconds > 0 else None
