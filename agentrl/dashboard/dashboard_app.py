"""The dashboard as an ASGI application, to be mounted at `/ui`. `install` gives it its parts."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from urllib.parse import quote

import orjson
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from agentrl.dashboard import page_rendering, sign_in_routes
from agentrl.dashboard.dashboard_parts import FOREVER, HEADERS, ROOT, Dashboard, dashboard_of, viewer_of
from agentrl.dashboard.page_request import Query, Runs
from agentrl.dashboard.pages import page_list
from agentrl.dashboard.pages.page_list import Page
from agentrl.dashboard.sign_in import Viewer
from agentrl.errors import RequestError, StoreError
from agentrl.store import Connection
from agentrl.store.views import change_mark, run_cards

log = logging.getLogger(__name__)
ANEW = "agentrl-anew-in"
"""A header: the page may lack the last change of its run, and is made anew after so many seconds."""


def create() -> Starlette:
    """The application. It answers once it has a Dashboard (`install`)."""
    pages = [Route(page.path, _shown(page), methods=["GET"]) for page in page_list.PAGES]
    own = [
        Route("/sign-in", sign_in_routes.sign_in_form, methods=["GET"]),
        Route("/sign-in", sign_in_routes.sign_in, methods=["POST"]),
        Route("/sign-out", sign_in_routes.sign_out, methods=["POST"]),
        Route("/static/{name:path}", static, methods=["GET"]),
        Route("/runs/{run}/live", live, methods=["GET"]),
    ]
    handlers: Mapping[Any, Any] = {RequestError: _on_request_error, StoreError: _on_store_error, 404: _on_no_page}
    return Starlette(routes=[*own, *pages], exception_handlers=handlers)


def install(app: Starlette, dashboard: Dashboard) -> None:
    """Let the application answer with these parts."""
    app.state.dashboard = dashboard


async def to_pages(request: Request) -> Response:
    """The route `/` of a server: its pages are below ROOT."""
    return RedirectResponse(f"{ROOT}/", 303)


async def static(request: Request) -> Response:
    """A script or a style."""
    found = page_rendering.assets().get(request.path_params["name"])
    if found is None:
        raise RequestError(404, "no such file", code="not_found")
    return Response(found.content, media_type=found.media_type, headers=FOREVER)


async def live(request: Request) -> Response:
    """Server-sent events: `changed`, when the run has changed."""
    dashboard, viewer = dashboard_of(request), await viewer_of(request)
    run = await _run(dashboard, viewer, request)
    if dashboard.live.is_full:
        raise RequestError(503, "too many open pages", code="too_many_pages", retry_after_s=30.0)
    request.scope["endless"] = True
    known = request.query_params.get("mark")
    return StreamingResponse(dashboard.live.events(run, known), media_type="text/event-stream", headers=HEADERS)


def _shown(page: Page) -> Callable[[Request], Awaitable[Response]]:
    """The handler of a page."""

    async def handler(request: Request) -> Response:
        dashboard, viewer = dashboard_of(request), await viewer_of(request)
        query = Query(request.query_params, request.query_params.multi_items())
        about = await _about(dashboard, viewer, request, page, query)

        async def make() -> bytes:
            async with dashboard.turns:
                body: bytes = await dashboard.read(
                    lambda found: _body_of(page, found), _read, page, about, request.path_params, query
                )
            return body

        name = f"{viewer.run_id}\0{request.url.path}?{request.url.query}"
        shared = await dashboard.shared.get(name, make)
        lacks = isinstance(about, str) and shared.began < dashboard.live.noticed_at(about)
        headers = {**HEADERS, ANEW: f"{max(0.0, shared.until - time.monotonic()):.2f}"} if lacks else HEADERS
        media_type = "application/json" if page.template is None else "text/html"
        return Response(shared.body, media_type=media_type, headers=headers)

    return handler


def _read(conn: Connection, page: Page, about: str | Runs | None, params: Mapping[str, str], query: Query) -> Any:
    """The content of a page, and the mark of its run at that moment."""
    mark = {"mark": change_mark.of_run(conn, about)} if page.template is not None and isinstance(about, str) else {}
    return page.read(conn, about, params, query) | mark


def _body_of(page: Page, found: Any) -> bytes:
    if page.template is None:
        return orjson.dumps(found, option=orjson.OPT_SERIALIZE_NUMPY)
    return page_rendering.render(page.template, **found).encode()


async def _about(dashboard: Dashboard, viewer: Viewer, request: Request, page: Page, query: Query) -> str | Runs | None:
    """The run or the runs of a page, which the viewer may see. Raises RequestError 404."""
    if page.run_of is not None:
        return await _run(dashboard, viewer, request)
    if not page.most_runs:
        return viewer.run_id
    named = [await _visible(dashboard, viewer, name) for name in query.texts("run", page.most_runs)]
    return Runs(list(dict.fromkeys(named)), viewer.run_id)


async def _run(dashboard: Dashboard, viewer: Viewer, request: Request) -> str:
    """The id of the run that an address names. Raises RequestError 404, also for a run that is not the viewer's."""
    return await _visible(dashboard, viewer, request.path_params.get("run"), request.path_params.get("session"))


async def _visible(dashboard: Dashboard, viewer: Viewer, run: str | None, session: str | None = None) -> str:
    run_id = await dashboard.read(_same, run_cards.id_of, run, session)
    if run_id is None or not viewer.may_see(run_id):
        raise RequestError(404, "there is no such page", code="not_found")
    found: str = run_id
    return found


def _same(value: Any) -> Any:
    return value


async def _on_request_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    asks_for_page = "text/html" in request.headers.get("accept", "")
    if error.status in (401, 403) and asks_for_page and request.method == "GET":
        here = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        if error.code == "missing_api_key":
            return RedirectResponse(f"{ROOT}/sign-in?next={quote(here)}", 303, headers=HEADERS)
        return sign_in_routes.sign_in_page(sign_in_routes.page_after(here), str(error), error.status)
    return _problem(error.status, str(error))


async def _on_store_error(request: Request, error: Exception) -> Response:
    log.error("dashboard: %s", error)
    return _problem(503, f"the database does not answer: {error}")


async def _on_no_page(request: Request, error: Exception) -> Response:
    return _problem(404, "there is no such page")


def _problem(status: int, message: str) -> Response:
    body = page_rendering.render("problem.html", message=message, status=status, run=None, title="Not shown")
    return Response(body, status, media_type="text/html", headers=HEADERS)
