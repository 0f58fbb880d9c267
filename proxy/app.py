"""The proxy: an ASGI application over one run, its store and its engines.

    agent ─► front_door ─► model_routes ─► answer_finder ─► exchanges ─► model_call
                               │ dialects: body → request, answer → body    ├► prompts + renderer   messages → token ids
                               │                                            ├► sampling ─► pool ─► SGLang
                               │                                            └► store: group commit, then the last event
                               └► upstreams ─► another model's server: recorded, never trained
    rollout worker, client ─► group_routes, session_routes    groups, sessions, rewards, ends
    trainer ─► publish_routes ─► publishing ─► updates        weights, of a share of the engines at once
    trainer, engines ─► version_routes                        files of weight versions
    programs, Prometheus ─► monitoring_routes
    browsers ─► agentrl.dashboard, below /ui

Calls wait for a serving engine, never for the trainer. A publish does not wait for calls. `composition` builds all
objects and runs the background tasks.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from fastapi import FastAPI

from agentrl.dashboard import dashboard_app, dashboard_parts
from agentrl.proxy import composition, dialects, error_responses
from agentrl.proxy.api_docs import docs_page, openapi
from agentrl.proxy.areal import areal_routes, export_routes
from agentrl.proxy.composition import Settings as Settings
from agentrl.proxy.front_door import FrontDoor, Handler
from agentrl.proxy.routes import (
    engine_routes,
    group_routes,
    key_routes,
    model_routes,
    monitoring_routes,
    response_routes,
    session_routes,
)
from agentrl.proxy.routes.counted_calls import counted
from agentrl.proxy.routes.weights import publish_routes, version_routes
from agentrl.version import __version__

ROUTERS = (
    group_routes.router,
    session_routes.router,
    publish_routes.router,
    key_routes.router,
    areal_routes.router,
    export_routes.router,
    monitoring_routes.router,
    engine_routes.router,
    docs_page.router,
)
READS: list[tuple[str, str, Handler]] = [
    ("/v1/messages/count_tokens", "POST", model_routes.count_tokens),
    ("/v1/models", "GET", model_routes.models),
    ("/v1/models/{model}", "GET", model_routes.models),
    ("/v1/responses/{response_id}", "GET", response_routes.retrieve),
    ("/v1/responses/{response_id}", "DELETE", response_routes.delete),
    ("/v1/responses/{response_id}/input_items", "GET", response_routes.input_items),
]
"""The routes of dialects that do not sample."""


def create_app(settings: Settings) -> FrontDoor:
    """The ASGI application. Raises UserError or StoreError for settings that cannot work, before anything serves."""
    served = composition.load_run(settings)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with composition.running(app, settings, served):
            yield

    return FrontDoor(routes(lifespan), model_handlers())


def model_handlers() -> dict[str, Handler]:
    """The handlers of model calls, by path."""
    handlers: dict[str, Handler] = {
        path: counted(dialect, model_routes.endpoint(dialect)) for path, dialect in dialects.DIALECTS.items()
    }
    return handlers | {f"/v1{path}": handlers[path] for path in dialects.OF_ANTHROPICS_SDK if path in handlers}


def routes(lifespan: Callable[[FastAPI], AbstractAsyncContextManager[None]] | None = None) -> FastAPI:
    """Every route and error handler. `lifespan` must install the objects that they use (`app_parts`)."""
    app = FastAPI(title="agentrl proxy", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    for router in ROUTERS:
        app.include_router(router)
    for prefix in openapi.PREFIXES:
        for path, handler in model_handlers().items():
            app.add_route(prefix + path, handler, ["POST"], include_in_schema=False)
        for path, method, handler in READS:
            app.add_route(prefix + path, handler, [method], include_in_schema=False)
            if path in dialects.OF_ANTHROPICS_SDK:
                app.add_route(f"{prefix}/v1{path}", handler, [method], include_in_schema=False)
    app.add_route("/versions/{name}/{file}", version_routes.version_file, ["GET", "PUT"], include_in_schema=False)
    app.state.pages = dashboard_app.create()
    app.add_route("/", dashboard_app.to_pages, ["GET"], include_in_schema=False)
    app.mount(dashboard_parts.ROOT, app.state.pages)
    openapi.install(app)
    error_responses.install(app)
    return app
