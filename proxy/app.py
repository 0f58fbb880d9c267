"""The proxy: an ASGI app over one run, its store and its engines.

    agent ──► model_routes.py ──► calls.py ──► prompts.py + renderer   messages → exact prompt ids
              dialects/          │    └──► sampling.py ──► pool.py ──► SGLang
                                 └──► store (group commit)          before the answer's last event
              upstreams.py ──► another model's server             passed on, recorded, never trained
    rollout worker, client ──► session_routes.py      groups, sessions, rewards, ends
    trainer ──► publish.py ──► updates.py        weights, engine by engine
    people ──► monitoring_routes.py

Background tasks: `EnginePool.watch` (who serves, who must catch up) and `sweep.py` (what nobody ends). They outlast any
fault of the database. Calls wait for a serving engine, never for the trainer; a publish waits for nobody.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from sqlalchemy import Row
from starlette.exceptions import HTTPException
from starlette.responses import Response

from agentrl.configs.run_config import RunConfig
from agentrl.engine.engine_keys import EngineKeys
from agentrl.engine.sglang_client import EngineClient
from agentrl.errors import FencedError, RequestError, StoreError, ValueRefused
from agentrl.proxy import dialects
from agentrl.proxy.access import keyring
from agentrl.proxy.access.keyring import Keyring
from agentrl.proxy.access.limits import Gate
from agentrl.proxy.access.public_address import PublicAddress
from agentrl.proxy.areal import areal_routes
from agentrl.proxy.calls import upstreams
from agentrl.proxy.calls.call_seeds import CallSeeds
from agentrl.proxy.calls.engine_params import forced_sampling
from agentrl.proxy.calls.sweep import sweep
from agentrl.proxy.calls.token_tree import TreeCache
from agentrl.proxy.calls.upstreams import Upstream
from agentrl.proxy.dialects.statuses import headers_of
from agentrl.proxy.engines import publishing
from agentrl.proxy.engines.adapters import Adapters
from agentrl.proxy.engines.engine_records import EngineRecords
from agentrl.proxy.engines.pool import EnginePool
from agentrl.proxy.engines.weight_checks import WeightFolders
from agentrl.proxy.front_door import FrontDoor, Handler
from agentrl.proxy.metrics import counters
from agentrl.proxy.routes import (
    docs_page,
    engine_routes,
    key_routes,
    model_routes,
    monitoring_routes,
    openapi,
    refusals,
    response_routes,
    session_routes,
    unknown_routes,
)
from agentrl.proxy.state import ProxyState
from agentrl.rendering import Renderer, load_renderer
from agentrl.store import Database, engine_turns, heartbeats, runs
from agentrl.store.calls import interactions
from agentrl.store.sessions.session_limits import Limits
from agentrl.version import __version__
from agentrl.weights_folder import ADAPTER, TENSORS

log = logging.getLogger(__name__)
LOOKS: list[tuple[str, str, Handler]] = [
    ("/v1/messages/count_tokens", "POST", model_routes.count_tokens),
    ("/v1/models", "GET", model_routes.models),
    ("/v1/models/{model}", "GET", model_routes.models),
    ("/v1/responses/{response_id}", "GET", response_routes.retrieve),
    ("/v1/responses/{response_id}", "DELETE", response_routes.delete),
    ("/v1/responses/{response_id}/input_items", "GET", response_routes.input_items),
]
"""The routes of dialects that sample nothing."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What `agentrl proxy` was started with."""

    database_url: str = field(repr=False)
    run_name: str
    engine_urls: list[str]
    engine_keys: EngineKeys = field(default_factory=EngineKeys, repr=False)
    admin_key: str = field(repr=False)
    replica: str  # stable over restarts, so that a restarted proxy finds its own orphaned calls


def create_app(settings: Settings) -> FrontDoor:
    """The ASGI app. What can be wrong with the settings raises UserError or StoreError here, before anything serves."""
    database = Database(settings.database_url)
    database.require_current()
    with database.read() as conn:
        run = runs.by_name(conn, settings.run_name)
    renderer = load_renderer(Path(run.base_model))
    others = upstreams.from_config(RunConfig.model_validate(run.config).proxy.upstreams)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with _running(settings, database, run, renderer, others) as state:
            app.state.proxy = state
            yield

    return FrontDoor(routes(lifespan), model_handlers())


def model_handlers() -> dict[str, Handler]:
    """The handlers of model calls, by path."""
    handlers: dict[str, Handler] = {
        path: counters.counted(dialect, model_routes.endpoint(dialect)) for path, dialect in dialects.DIALECTS.items()
    }
    return handlers | {f"/v1{path}": handlers[path] for path in dialects.OF_ANTHROPICS_SDK if path in handlers}


def routes(lifespan: Callable[[FastAPI], AbstractAsyncContextManager[None]] | None = None) -> FastAPI:
    """Every route and error handler, over whatever `lifespan` puts into `app.state.proxy`."""
    app = FastAPI(title="agentrl proxy", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.include_router(session_routes.router)
    app.include_router(key_routes.router)
    app.include_router(areal_routes.router)
    app.include_router(monitoring_routes.router)
    app.include_router(refusals.router)
    app.include_router(engine_routes.router)
    app.include_router(docs_page.router)
    for prefix in openapi.PREFIXES:
        for path, handler in model_handlers().items():
            app.add_route(prefix + path, handler, ["POST"], include_in_schema=False)
        for path, method, handler in LOOKS:
            app.add_route(prefix + path, handler, [method], include_in_schema=False)
            if path in dialects.OF_ANTHROPICS_SDK:
                app.add_route(f"{prefix}/v1{path}", handler, [method], include_in_schema=False)
    openapi.install(app)
    app.add_exception_handler(RequestError, _on_request_error)
    app.add_exception_handler(FencedError, _on_fenced_error)
    app.add_exception_handler(ValueRefused, _on_value_refused)
    app.add_exception_handler(StoreError, _on_store_error)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    return app


@asynccontextmanager
async def _running(
    settings: Settings, database: Database, run: Row[Any], renderer: Renderer, others: dict[str, Upstream]
) -> AsyncIterator[ProxyState]:
    config = RunConfig.model_validate(run.config)

    by_adapter = config.trainer.lora.publish == "adapter"
    folders = WeightFolders(ADAPTER if by_adapter else TENSORS)
    records = EngineRecords(database, run.id, str(run.base_model), settings.replica, folders)

    async def load_tree(
        session_id: str, after: int, known: Mapping[str, interactions.Node]
    ) -> tuple[int, list[interactions.Node]]:
        return await state.read(interactions.load_tree, session_id, after, known)

    timeout = aiohttp.ClientTimeout(total=None, sock_connect=5)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as http:
        clients = [EngineClient(url, http, key=settings.engine_keys.of(url)) for url in settings.engine_urls]
        pool = EnginePool(
            clients,
            records,
            adapters=Adapters(records.oldest_call) if by_adapter else None,
            pause_mode=config.publish.pause,
            update_timeout_s=config.publish.update_timeout_s,
        )
        state = ProxyState(
            database=database,
            run_id=run.id,
            run_name=run.name,
            run_created_at=run.created_at,
            keyring=Keyring(settings.admin_key),
            replica=settings.replica,
            renderer=renderer,
            pool=pool,
            limits=Limits.of(config),
            sampling=forced_sampling(config),
            seeds=CallSeeds(run.seed, database) if config.engine.deterministic else None,
            request_timeout_s=config.proxy.request_timeout_s,
            max_body_bytes=config.proxy.max_body_bytes,
            body_timeout_s=config.proxy.body_timeout_s,
            gate=Gate.of(config.proxy),
            public=PublicAddress.of(config.proxy),
            retry_grace_s=config.proxy.retry_grace_s,
            restore_dropped_text=config.proxy.restore_dropped_text,
            named_sessions=config.proxy.named_sessions,
            model_aliases=config.proxy.model_aliases,
            clip_max_tokens=config.proxy.clip_max_tokens,
            trees=TreeCache(load_tree),
            upstreams=others,
            http=http,
            metrics_public=config.proxy.metrics_public,
        )
        database.on_commit = state.metrics.committed
        await keyring.refresh(state)
        await state.write(heartbeats.beat, run.id, "proxy", settings.replica)
        await state.write(engine_turns.release, run.id, settings.replica)
        lost = await state.write(interactions.declare_lost, run.id, settings.replica)
        if lost:
            state.metrics.ended("lost", lost)
            log.warning("%d calls of an earlier process of this proxy are lost", lost)
        background = asyncio.create_task(_background(state, config), name="proxy-background")
        try:
            yield state
        finally:
            background.cancel()
            with suppress(asyncio.CancelledError):
                await background
            for exchange in list(state.exchanges.values()):
                await exchange.stop()
            for client in clients:
                client.close()
            await asyncio.to_thread(state.heavy.close)
            state.record_given()
            await asyncio.to_thread(database.close)


async def _background(state: ProxyState, config: RunConfig) -> None:
    """The background tasks; when one fails the proxy stops, visibly, rather than run without it."""
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(_resume(state, config))
            group.create_task(state.pool.watch())
            group.create_task(sweep(state))
            group.create_task(keyring.watch(state))
            group.create_task(counters.watch(state))
    except* Exception as errors:
        log.critical("a background task failed, stopping: %s", errors.exceptions[0], exc_info=errors)
        signal.raise_signal(signal.SIGTERM)


async def _resume(state: ProxyState, config: RunConfig) -> None:
    """Finish a publish that a dead proxy began, as soon as an engine takes it."""
    while True:
        try:
            return await publishing.resume(state, config)
        except (RequestError, StoreError) as error:
            log.info("%s; trying again", error)
            await asyncio.sleep(1)


def _error_response(request: Request, error: RequestError) -> Response:
    """The error in the caller's dialect."""
    dialect = dialects.of_request(request.url.path, request.headers)
    status, headers = dialect.status(error), headers_of(error)
    request.app.state.proxy.metrics.refused(status, error.code)
    if error.status in (408, 413):
        headers["connection"] = "close"  # the rest of the body may never come
    body = dialect.encode_error(error)
    if request.url.path in areal_routes.PATHS:
        body = areal_routes.with_detail(body)
    return Response(body, status_code=status, headers=headers, media_type="application/json")


async def _on_request_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    await refusals.note(request, error)
    return _error_response(request, error)


async def _on_store_error(request: Request, error: Exception) -> Response:
    log.error("%s", error)
    return _error_response(request, RequestError(503, str(error), code="store_unavailable", retry_after_s=1.0))


async def _on_value_refused(request: Request, error: Exception) -> Response:
    return _error_response(request, RequestError(400, f"this cannot be stored: {error}", code="invalid_parameter"))


async def _on_fenced_error(request: Request, error: Exception) -> Response:
    return _error_response(request, RequestError(409, str(error), code="epoch_over"))


async def _on_validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"] if part != "body")
    if first["type"] == "json_invalid":
        return _error_response(request, RequestError(400, "the body is not valid JSON", code="invalid_json"))
    message = f"{where or 'the body'}: {first['msg']}"
    return _error_response(request, RequestError(422, message, code="invalid_parameter", param=where or None))


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 404:  # no route of ours raises it
        return await _on_request_error(request, unknown_routes.no_route(request))
    return _error_response(request, RequestError(error.status_code, str(error.detail), code="http_error"))
