"""The 404 for an unknown address, with a hint at the route that was probably meant."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

from starlette.requests import Request
from starlette.routing import BaseRoute, Route

from agentrl.errors import RequestError
from agentrl.proxy.sessions.refusals import NO_ROUTE

NEAR = 0.7
LONGEST = 200
_OF_SESSION = re.compile(r"/sessions/[^/]+(?=/)")


def no_route(request: Request) -> RequestError:
    """The 404 for a request that no route matches."""
    path = request.url.path
    of_session = _OF_SESSION.match(path)
    prefix = of_session[0] if of_session else ""
    hint = _hint(path[len(prefix) :], prefix, _served(request.app.routes))
    return RequestError(404, f"there is no route {request.method} {path[:LONGEST]}{hint}", code=NO_ROUTE)


def _hint(path: str, prefix: str, served: Iterable[str]) -> str:
    served = list(served)
    if path.startswith("/v1/v1/") and path.removeprefix("/v1") in served:
        return ": base_url ends in one /v1, not in two"
    if f"/v1{path}" in served:
        return ": base_url must end in /v1"
    near = difflib.get_close_matches(path, served, n=1, cutoff=NEAR)
    return f"; did you mean {prefix}{near[0]}?" if near else ""


def _served(routes: Iterable[BaseRoute]) -> set[str]:
    """The paths of all routes, without the session's prefix."""
    found = (route.path for route in routes if isinstance(route, Route))
    return {path.removeprefix("/sessions/{session_id}") for path in found} - {""}
