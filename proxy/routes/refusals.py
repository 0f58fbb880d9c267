"""What was refused: calls of a known session that never became calls in the store, and why.

An agent that misspells a model or asks for too many tokens leaves no call behind. So that somebody can be told, the
refusals of a session are `refused` events of its run: the first ones, because a client may go on for ever.
"""

from __future__ import annotations

import time
from contextlib import suppress

from fastapi import APIRouter
from starlette.requests import Request

from agentrl.domain.schemas import Json
from agentrl.errors import RequestError, StoreError
from agentrl.proxy.access import authentication
from agentrl.proxy.access.client_names import client_of
from agentrl.proxy.dialects import DIALECTS, of_request
from agentrl.proxy.routes import model_routes, named_sessions
from agentrl.proxy.state import ProxyState
from agentrl.store import events

router = APIRouter(tags=["sessions"])
LONGEST = 500
"""Characters of a message that are kept."""
NO_ROUTE = "route_not_found"
_NOT_OURS = (401, 403, 499)
"""Nobody known asked, or nobody waits any more."""
_HAS_A_CALL = ("engine_rejected",)


@router.get("/sessions/{session_id}/refusals")
async def of_session(session_id: str, request: Request) -> list[Json]:
    """Calls of the session that were refused before they began, oldest first: status, code, param, message, route."""
    state: ProxyState = request.app.state.proxy
    session_id = await named_sessions.resolve(request, state, session_id)
    return await state.write(events.refusals, state.run_id, session_id)  # behind those that still wait for their commit


async def note(request: Request, error: RequestError) -> None:
    """Record a refusal. Does not wait for the commit: the refusal itself needs none."""
    if not 400 <= error.status < 500 or error.status in _NOT_OURS or error.code in _HAS_A_CALL:
        return
    state: ProxyState = request.app.state.proxy
    with suppress(RequestError, StoreError):
        session_id = await _session(request, state, error)
        if session_id is None or state.refusals.get(session_id, 0) >= events.REFUSALS_KEPT:
            return
        state.refusals[session_id] = state.refusals.get(session_id, 0) + 1
        status = of_request(request.url.path, request.headers).status(error)  # as the client was told
        refusal = {
            "session_id": session_id,
            "status": status,
            "code": error.code,
            "param": error.param and error.param[:LONGEST].replace("\0", ""),
            "message": str(error)[:LONGEST].replace("\0", ""),
            "route": request.url.path[:LONGEST],
            "at": time.time(),
            "client": client_of(request),
        }
        caller = getattr(request.state, "caller", None)
        if caller is not None:  # so that a retry of it is not taken for one of another request
            refusal |= {"digest": caller.digest, "retry": caller.retry}
        state.database.submit(events.record, state.run_id, events.REFUSED, refusal, state.replica)


async def _session(request: Request, state: ProxyState, error: RequestError) -> str | None:
    """The session whose model call it was, or would have been at the right address. Raises RequestError, StoreError."""
    if request.method != "POST":
        return None
    if error.code == NO_ROUTE:
        return (await authentication.authenticate(request, state)).session_id
    if not request.url.path.endswith(tuple(path.removeprefix("/v1") for path in DIALECTS)):  # AReaL has no /v1
        return None
    return await model_routes.session_of(request, state)
