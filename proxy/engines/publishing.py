"""Publishes a weight version, to a share of the engines at once, so that the others serve, and moves the run to it.

PENDING ─ every serving engine has loaded it ─► PUBLISHED
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from functools import partial

from agentrl.configs.run_config import RunConfig
from agentrl.domain.schemas import Json, VersionState
from agentrl.errors import FencedError, RequestError, StoreError
from agentrl.proxy.engines.delivery.preparations import Wish
from agentrl.proxy.engines.delivery.publish_facts import publish_facts
from agentrl.proxy.engines.delivery.wave_run import ALL_AT_ONCE, Outcome, WaveRun
from agentrl.proxy.engines.engine_state import Engine, EngineState
from agentrl.proxy.engines.pool import EnginePool
from agentrl.proxy.engines.tensor_transfer import Broadcast, Handles
from agentrl.proxy.engines.version_delivery import BY_FOLDER, KEPT, Delivery, Loaded, Prepared, RecordedFolder
from agentrl.proxy.run_store import RunStore
from agentrl.store import evaluation_episodes, runs
from agentrl.store.training import memory_leases, publishes, trainer_epochs, version_states

log = logging.getLogger(__name__)


async def publish(
    store: RunStore, pool: EnginePool, version: int, epoch: int | None = None, delivery: Delivery = BY_FOLDER
) -> Json:
    """Bring every engine to `version`, then move the run to it. Publishing twice is harmless.

    Engines prepare it first, and change in waves (`delivery`); those that may keep their version (`publish.lag`) change
    later. A slow engine delays the run's move, not the other engines.

    An engine that fails is ejected; any replica's pool updates it to the run's version when it answers again.
    After a StoreError no further engine is updated; those under way finish, and the publish can be repeated.

    Raises StoreError, and RequestError: 404 for an unknown version, 409 for a rolled-back one and for one that the run
    is past, 503 when no engine took it, or when a trainer of another epoch has its turn on the engines' GPUs. The
    publish ends the turn of `epoch`. Raises FencedError when a trainer newer than `epoch` has started, and StoreError
    when the run moves past the version meanwhile: before any engine is touched, or, like after any StoreError, when
    those under way have finished.
    """
    if epoch is not None:
        await store.write(trainer_epochs.check_epoch, store.run_id, epoch)
    row = await store.read(runs.version, store.run_id, version)
    if row is None:
        raise RequestError(404, f"run {store.run_name} has no version {version}", code="version_not_found")
    if row.state == VersionState.ROLLED_BACK:
        raise RequestError(409, f"version {version} was rolled back", code="version_rolled_back")
    if (newer := await store.read(version_states.overtaken_by, store.run_id, version)) is not None:
        raise RequestError(409, f"version {version} is old: the run has version {newer}", code="version_overtaken")
    if not await store.write(memory_leases.hand_back, store.run_id, epoch, version):
        message = f"version {version} is not published: a trainer computes on the engines' GPUs"
        raise RequestError(503, message, code="memory_leased", retry_after_s=1.0)
    delivery = replace(delivery, folder=RecordedFolder(row.path, row.checksum))
    async with pool.update_lock:
        started, pool.publishing = time.time(), version
        try:
            outcome = await _load_all(pool, version, epoch, delivery)
        finally:
            pool.publishing = None
        loaded, problems = outcome.loaded, outcome.problems
        if not loaded:
            message = f"no engine took version {version}: {problems[-1] if problems else 'there is none'}"
            raise RequestError(503, message, code="publish_failed", retry_after_s=1.0)
        facts = publish_facts(version, pool.engines, loaded, delivery, time.time() - started)
        await store.write(publishes.complete, store.run_id, version, epoch, facts, started)
    return facts


async def _load_all(pool: EnginePool, version: int, epoch: int | None, delivery: Delivery) -> Outcome:
    """Bring the engines to `version`, in waves: what was loaded, by URL, and what failed. Raises StoreError."""

    kept = set() if delivery.transfer is not None else await pool.kept(version)

    async def load(engine: Engine, prepared: Prepared | None) -> Loaded:
        if kept and await pool.keeps(engine, kept):
            return Loaded(0.0, KEPT, prepared=prepared)
        return await pool.load(engine, version, delivery, prepared)

    pace = ALL_AT_ONCE if isinstance(delivery.transfer, Broadcast | Handles) else pool.pace
    waves = WaveRun(pool.engines, pace, load, pool.reports.lost, partial(_check, pool, version, epoch, pool.version))
    return await waves.run(pool.preparations, _wish(pool, version, delivery))


def _wish(pool: EnginePool, version: int, delivery: Delivery) -> Wish | None:
    """The version that engines prepare before they pause; None where they get it in another way."""
    if pool.preparations is None or delivery.transfer is not None or delivery.folder is None:
        return None
    if any(engine.state is EngineState.RELEASED for engine in pool.engines):
        return None  # their memory is the trainer's
    return pool.preparations.wish(version, delivery.folder, delivery.digests)


def _check(pool: EnginePool, version: int, epoch: int | None, before: int | None) -> None:
    """Raise FencedError when a newer trainer is known to have started: it publishes a version of its own.

    Raises StoreError when the run is known to have moved, from `before`, past the version that is being published.
    """
    if epoch is not None and pool.trainer_epoch > epoch:
        raise FencedError(f"trainer epoch {epoch} is over: epoch {pool.trainer_epoch} has started")
    now = pool.version
    if now is not None and now != before and now > version:
        raise StoreError(f"version {version} is old: the run has version {now}")


async def resume(store: RunStore, pool: EnginePool, config: RunConfig) -> None:
    """Finish a publish that a dead replica began: publish the newest version that is durable but not published.

    Skips a version that the trainer holds back for an evaluation: its publish has not begun.
    """
    version = await store.read(publishes.pending, store.run_id)
    if version is not None and not await store.read(evaluation_episodes.paused, store.run_id, version, config):
        log.info("finishing the publish of version %d", version)
        await publish(store, pool, version)
