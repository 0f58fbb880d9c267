"""The composition root: builds the objects of one proxy process, runs its background tasks, and closes it.

Background tasks: `EnginePool.watch` (which engines serve, which must be updated), `Sweep.run` (ends the sessions and
calls of silent participants), the watches of the keyring and of the metrics. They retry while the database is
unavailable. `TraceProcess` sends spans.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp
from fastapi import FastAPI

from agentrl.configs.run_config import RunConfig
from agentrl.dashboard import dashboard_app
from agentrl.dashboard.dashboard_parts import Dashboard
from agentrl.dashboard.sign_in import Signer
from agentrl.domain.schemas import Json
from agentrl.engine.checks.load_checks import LoadChecks
from agentrl.engine.engine_client import EngineClient
from agentrl.engine.engine_connections import EngineConnections
from agentrl.engine.engine_keys import EngineKeys
from agentrl.errors import RequestError, StoreError
from agentrl.proxy.access import keyring
from agentrl.proxy.access.authentication import Access
from agentrl.proxy.access.dashboard_door import KeyDoor
from agentrl.proxy.access.heavy_work import Heavy
from agentrl.proxy.access.keyring import Keyring
from agentrl.proxy.access.limits import Gate
from agentrl.proxy.access.public_address import PublicAddress
from agentrl.proxy.access.request_body import BodyLimits
from agentrl.proxy.calls.answer_finder import AnswerFinder
from agentrl.proxy.calls.call_context import CallContext
from agentrl.proxy.calls.call_seeds import CallSeeds
from agentrl.proxy.calls.call_settings import CallSettings
from agentrl.proxy.calls.delivery_notes import DeliveryNotes
from agentrl.proxy.calls.live_sessions import LiveSessions
from agentrl.proxy.calls.sweep import Sweep
from agentrl.proxy.calls.token_tree import TreeCache
from agentrl.proxy.calls.upstreams import upstream_models
from agentrl.proxy.calls.upstreams.upstream_calls import Upstreams
from agentrl.proxy.calls.upstreams.upstream_models import Upstream
from agentrl.proxy.engines import publishing
from agentrl.proxy.engines.adapters import Adapters
from agentrl.proxy.engines.delivery.preparations import Preparations
from agentrl.proxy.engines.delivery.version_places import VersionPlaces, places_of
from agentrl.proxy.engines.delivery.wave_run import Pace
from agentrl.proxy.engines.engine_records import EngineRecords
from agentrl.proxy.engines.pool import EnginePool
from agentrl.proxy.engines.weight_checks import WeightFolders
from agentrl.proxy.metrics.counters import Metrics
from agentrl.proxy.metrics.scrape import Scrape
from agentrl.proxy.metrics.trace_process import TraceProcess
from agentrl.proxy.routes import app_parts
from agentrl.proxy.routes.weights import version_routes
from agentrl.proxy.run_store import RunStore
from agentrl.proxy.sessions.refusals import RefusalLog
from agentrl.proxy.sessions.session_ends import SessionEnds
from agentrl.proxy.sessions.session_finder import SessionFinder
from agentrl.rendering import Renderer, load_renderer
from agentrl.store import Database, engine_claims, heartbeats, runs
from agentrl.store.calls import call_tree, running_calls
from agentrl.store.engine_rows import Member
from agentrl.store.sessions.session_limits import Limits
from agentrl.trace_endpoint import endpoint_of
from agentrl.versions.version_uploads import Uploads
from agentrl.versions.weights_folder import ADAPTER, TENSORS

log = logging.getLogger(__name__)
HAND_OVER_S = 2.0


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings with which `agentrl proxy` was started."""

    database_url: str = field(repr=False)
    run_name: str
    engine_urls: list[str]  # addresses, which may name a backend
    engine_keys: EngineKeys = field(default_factory=EngineKeys, repr=False)
    admin_key: str = field(repr=False)
    replica: str  # stable over restarts, so that a restarted proxy finds its own orphaned calls
    listens: tuple[str, int] | None = None  # host and port, by which engines find this proxy's files


@dataclass(frozen=True, kw_only=True)
class ServedRun:
    """The run that a proxy serves, as it was loaded at the start."""

    store: RunStore
    config: RunConfig
    base_model: str
    seed: int
    renderer: Renderer
    call_settings: CallSettings
    upstreams: Mapping[str, Upstream]


def load_run(settings: Settings) -> ServedRun:
    """Load the run, its renderer and its upstreams' keys; check its receiver of spans. Raises UserError, StoreError."""
    database = Database(settings.database_url)
    database.require_current()
    with database.read() as conn:
        run = runs.by_name(conn, settings.run_name)
    renderer = load_renderer(Path(run.base_model))
    config = RunConfig.model_validate(run.config)
    if config.metrics.traces is not None:
        endpoint_of(config.metrics.traces, os.environ)
    store = RunStore(
        database=database,
        run_id=run.id,
        run_name=run.name,
        run_created_at=run.created_at,
        replica=settings.replica,
        limits=Limits.of(config),
    )
    return ServedRun(
        store=store,
        config=config,
        base_model=str(run.base_model),
        seed=run.seed,
        renderer=renderer,
        call_settings=CallSettings.of(config, Path(run.base_model)),
        upstreams=upstream_models.from_config(config.proxy.upstreams),
    )


@asynccontextmanager
async def running(app: FastAPI, settings: Settings, served: ServedRun) -> AsyncIterator[None]:
    """Run the proxy: its objects are in `app.state` while the block runs."""
    store, config = served.store, served.config
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=5)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as http:
        keys = replace(settings.engine_keys, admin_key=settings.admin_key)
        connections = EngineConnections(http, keys, config.engine.backend)
        places = places_of(config, settings.admin_key, settings.listens)
        pool = engine_pool(connections, settings.engine_urls, served, places)
        access, metrics, heavy = Access(Keyring(settings.admin_key), store), Metrics(), Heavy()
        trees = tree_cache(store)
        sessions = LiveSessions(store, access.keyring, Gate.of(config.proxy), trees, pool)
        context = CallContext(
            store=store,
            sessions=sessions,
            renderer=served.renderer,
            trees=trees,
            pool=pool,
            heavy=heavy,
            metrics=metrics,
            settings=served.call_settings,
            seeds=CallSeeds(served.seed, store) if config.engine.deterministic else None,
        )
        notes = DeliveryNotes(store)
        answers = AnswerFinder(context, notes)
        finder = SessionFinder(store, access, sessions, config.proxy.named_sessions)
        scrape = Scrape(metrics, store, pool, config.proxy.metrics_public)
        app_parts.install(
            app,
            store=store,
            access=access,
            body_limits=BodyLimits(config.proxy.max_body_bytes, config.proxy.body_timeout_s),
            public_address=PublicAddress.of(config.proxy),
            pool=pool,
            engine_connections=connections,
            metrics=metrics,
            scrape=scrape,
            context=context,
            answers=answers,
            upstreams=Upstreams(
                configured=served.upstreams, context=context, http=http, max_answer_bytes=config.proxy.max_body_bytes
            ),
            finder=finder,
            ends=SessionEnds(store, sessions, answers),
            refusals=RefusalLog(store, finder),
            version_files=version_routes.served(places.shelves, access.keyring, settings.admin_key),
            uploads=Uploads(places.weights),
        )
        dashboard = Dashboard(
            read=store.read_then,
            door=KeyDoor(access),
            signer=await asyncio.to_thread(Signer.of, settings.admin_key),
            secure=(config.proxy.public_url or "").startswith("https:"),
        )
        dashboard_app.install(app.state.pages, dashboard)
        store.database.on_commit = metrics.committed
        await access.refresh()

        def about() -> Json:
            return {"host": socket.gethostname(), "pid": os.getpid(), **pool.about()}

        await _take_over(store, metrics, about())
        sweep = Sweep(
            store=store,
            serving=context.serving,
            forget=sessions.forget,
            stop_orphans=answers.stop_orphans,
            about=about,
        )
        background = asyncio.create_task(
            _background(
                _resume_publish(store, pool, config),
                pool.watch(),
                sweep.run(),
                keyring.watch(access.keyring, store),
                scrape.watch(),
            ),
            name="proxy-background",
        )
        # Apart from the background: its failure stops nothing, and its end may take seconds.
        tracing = asyncio.create_task(TraceProcess(store, pool, config.metrics.traces).run(), name="trace-process")
        tracing.add_done_callback(_log_failure)
        try:
            yield
        finally:
            background.cancel()
            with suppress(asyncio.CancelledError):
                await background
            await _hand_over(store, about())
            tracing.cancel()
            await asyncio.wait([tracing])
            await answers.stop_all()
            for engine in pool.engines:
                engine.client.close()
            await asyncio.to_thread(heavy.close)
            notes.flush()
            await asyncio.to_thread(store.database.close)


def engine_pool(
    connections: EngineConnections, addresses: list[str], served: ServedRun, places: VersionPlaces
) -> EnginePool:
    """The pool of a run's engines, which get whole weights or adapters as the run publishes them."""
    config, publish = served.config, served.config.publish
    by_adapter = config.trainer.lora.publish == "adapter"
    fits = LoadChecks(Path(served.base_model))
    folders = WeightFolders(ADAPTER, fits=fits) if by_adapter else WeightFolders(TENSORS, places, fits)
    records = EngineRecords(served.store, served.base_model, folders)

    def joined(member: Member) -> EngineClient:
        return connections.joined(member.url, member.backend, own_key=member.own_key)

    return EnginePool(
        [connections.listed(address) for address in addresses],
        records,
        connect=joined,
        adapters=Adapters(records.oldest_call) if by_adapter else None,
        watchers=config.proxy.engine_watchers,
        silent_s=config.proxy.heartbeat_timeout_s,
        pause_mode=publish.pause,
        update_timeout_s=publish.update_timeout_s,
        pace=Pace(serving_share=publish.serving_share, parallel=publish.parallel),
        preparations=None if by_adapter else Preparations.of(publish, places),
    )


def tree_cache(store: RunStore) -> TreeCache:
    """The token trees, loaded from the store."""

    async def load(
        session_id: str, after: int, known: Mapping[str, call_tree.Node]
    ) -> tuple[int, list[call_tree.Node]]:
        return await store.read(call_tree.load_tree, session_id, after, known)

    return TreeCache(load)


async def _take_over(store: RunStore, metrics: Metrics, about: Json) -> None:
    """Announce this replica, and close the calls that an earlier process of it left open."""
    await store.write(heartbeats.beat, store.run_id, "proxy", store.replica, about)
    await store.write(engine_claims.expire_claims, store.run_id, store.replica)
    lost = await store.write(running_calls.declare_lost, store.run_id, store.replica)
    if lost:
        metrics.ended("lost", lost)
        log.warning("%d calls of an earlier process of this proxy are lost", lost)


async def _hand_over(store: RunStore, about: Json) -> None:
    """Tell the other replicas that this one ends, so that they watch its engines from now on."""
    try:
        async with asyncio.timeout(HAND_OVER_S):
            await store.write(heartbeats.beat, store.run_id, "proxy", store.replica, {**about, "ended": True})
    except (StoreError, TimeoutError) as error:
        log.info("the other replicas will notice by its heartbeats that this one has ended: %s", error or "time-out")


async def _background(*tasks: Coroutine[Any, Any, None]) -> None:
    """Run the background tasks. When one fails, the whole proxy stops: it never runs without one of them."""
    try:
        async with asyncio.TaskGroup() as group:
            for task in tasks:
                group.create_task(task)
    except* Exception as errors:
        log.critical("a background task failed, stopping: %s", errors.exceptions[0], exc_info=errors)
        signal.raise_signal(signal.SIGTERM)


def _log_failure(task: asyncio.Task[None]) -> None:
    """Say that a task which nothing depends on has failed."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("%s failed, the proxy goes on without it: %r", task.get_name(), error)


async def _resume_publish(store: RunStore, pool: EnginePool, config: RunConfig) -> None:
    """Finish a publish that a dead proxy began, as soon as an engine takes it."""
    while True:
        try:
            return await publishing.resume(store, pool, config)
        except (RequestError, StoreError) as error:
            log.info("%s; trying again", error)
            await asyncio.sleep(1)
