"""AReaL's export: `POST /export_trajectories` waits for sessions to end, and returns what they sampled."""

from __future__ import annotations

import asyncio
import time

from fastapi import APIRouter, Request
from starlette.responses import Response

from agentrl.domain.schemas import Json, SessionStatus
from agentrl.errors import RequestError
from agentrl.proxy.access.authentication import Power
from agentrl.proxy.areal.areal_bodies import ExportBody
from agentrl.proxy.areal.exported_tensors import exported
from agentrl.proxy.routes import app_parts
from agentrl.proxy.routes.authenticated_bodies import GuardedRoute
from agentrl.proxy.routes.large_answers import as_json
from agentrl.proxy.run_store import RunStore
from agentrl.store.sessions import areal_sessions, session_lookup
from agentrl.store.sessions.areal_sessions import Path

router = APIRouter(tags=["areal"], route_class=GuardedRoute)
FIRST_POLL_S, LONGEST_POLL_S = 0.05, 1.0
ONLY_TRAJECTORY = 0
"""The number of a session's only trajectory. AReaL's inference service numbers the trajectories between rewards."""
NO_REWARD = "it was exported without a reward"


@router.post("/export_trajectories", response_model=Json)
async def export_trajectories(body: ExportBody, request: Request) -> Response:
    """The calls of an ended session with tokens and returns. The session stays stored, and can be exported again.

    Waits for the end of `session_id`; 409 if it is still open after `proxy.request_timeout_s`. Of `session_ids`,
    unknown sessions and those without a reward are left out. `individual`: every call, its prompt and its output.
    `concat`: every leaf with all calls that led to it; a call that several paths share is trained in the first.
    """
    await app_parts.access(request).require(request, Power.RUN, Power.ADMIN)
    store = app_parts.store(request)
    if body.session_id is not None:
        status = await _ended(request, body.session_id)
        return await _answer(store, body, [body.session_id], status=status)
    ready = [
        session_id
        for session_id in body.session_ids or ()
        if body.trajectory_id in (None, ONLY_TRAJECTORY) and await _is_ready(request, body, session_id)
    ]
    return await _answer(store, body, ready)


async def _answer(store: RunStore, body: ExportBody, session_ids: list[str], **more: str) -> Response:
    each_call = body.style == "individual"

    def encode(paths: list[Path]) -> bytes:
        return as_json({"interactions": exported(paths, each_call=each_call, encoding=body.encoding), **more})

    query = areal_sessions.paths_of_all
    encoded = await store.read_then(encode, query, session_ids, body.discount, each_call=each_call)
    return Response(encoded, media_type="application/json")


async def _is_ready(request: Request, body: ExportBody, session_id: str) -> bool:
    """Whether a session has a reward. `remove_session` ends the session; without a reward it is abandoned."""
    store = app_parts.store(request)
    row = await store.read(session_lookup.get, session_id)
    if row is None or row.run_id != store.run_id:
        return False
    rewarded = await store.read(areal_sessions.is_rewarded, session_id)
    if body.remove_session:
        status = SessionStatus.COMPLETED if rewarded else SessionStatus.ABANDONED
        await app_parts.ends(request).end(session_id, status, None if rewarded else NO_REWARD)
        await _ended(request, session_id)
    return rewarded


async def _ended(request: Request, session_id: str) -> str:
    """Wait until a session takes no more calls; returns its status. Raises RequestError 404, 409, 499."""
    await app_parts.access(request).session_caller(request, session_id)
    store, timeout_s = app_parts.store(request), app_parts.context(request).settings.request_timeout_s
    deadline, pause_s = time.monotonic() + timeout_s, FIRST_POLL_S
    while True:
        row = await store.read(session_lookup.get, session_id)
        assert row is not None, "sessions are never deleted"
        if row.status not in (SessionStatus.OPEN, SessionStatus.CLOSING):
            return str(row.status)
        if time.monotonic() > deadline:
            raise RequestError(409, f"session {session_id} has not ended", code="session_open")
        if await request.is_disconnected():
            raise RequestError(499, "the client disconnected", code="client_closed_request")
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_POLL_S)
