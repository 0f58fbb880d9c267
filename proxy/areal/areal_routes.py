"""AReaL's front door: its agents, clients and gateways run against this proxy unchanged.

    POST /grant_capacity        how many sessions admission would take now; no permit is granted
    POST /rl/start_session      opens a session of an outside program, or a group, with a key that may be used again
    POST /chat/completions, …   the model, under AReaL's paths, which have no /v1
    POST /rl/set_reward         records a reward of a call
    POST /rl/end_session        seals the session
    POST /export_trajectories   what was sampled, with returns, as tensors or as lists   (export_routes)

Shapes and statuses are AReaL's; behind them is the same code as behind `routes/session_routes.py`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from agentrl.domain.schemas import Json
from agentrl.errors import RequestError
from agentrl.proxy.access import authentication
from agentrl.proxy.access.authentication import Access, Power
from agentrl.proxy.areal.areal_bodies import RewardBody, StartBody
from agentrl.proxy.areal.export_routes import ONLY_TRAJECTORY
from agentrl.proxy.dialects import DIALECTS
from agentrl.proxy.routes import app_parts, model_routes
from agentrl.proxy.routes.authenticated_bodies import GuardedRoute
from agentrl.proxy.routes.counted_calls import counted
from agentrl.proxy.sessions.admission import admitted
from agentrl.store.db.codec import hash_key
from agentrl.store.sessions import areal_sessions, group_admission

router = APIRouter(tags=["areal"], route_class=GuardedRoute)


@router.post("/grant_capacity")
async def grant_capacity(request: Request) -> Json:
    """How many sessions admission would take now. It grants nothing, so no permit can exceed the staleness bound."""
    await app_parts.access(request).require(request, Power.RUN, Power.ADMIN)
    store = app_parts.store(request)
    return {"capacity": await store.read(group_admission.free_slots, store.run_id, store.limits)}


@router.post("/rl/start_session")
async def start_session(body: StartBody, request: Request) -> JSONResponse:
    """Start a session, or with `group_size` a group of them (201). 429 while admission refuses.

    If `api_key` opens a session already, that session is ended first; then the key opens the new one.
    """
    access, store = app_parts.access(request), app_parts.store(request)
    await access.require(request, Power.RUN, Power.ADMIN)
    begun = await authentication.start_of(request, store.run_id)
    new_keys = [begun.session_key(i, authentication.REUSABLE) for i in range(max(1, body.group_size or 1))]
    if body.api_key:
        _check_choice(access, body.api_key)
        new_keys[0] = body.api_key
        before = await store.read(areal_sessions.open_session, store.run_id, hash_key(body.api_key), begun.digest)
        if before is not None:
            await app_parts.ends(request).end(before)
    hashes = [hash_key(key) for key in new_keys]
    group = await admitted(store, areal_sessions.start, hashes, body.task_id, outside=True, start_digest=begun.digest)
    opened = list(zip(group.session_ids, new_keys, strict=True))
    if body.group_size is None:
        return JSONResponse({"session_id": opened[0][0], "api_key": opened[0][1]})
    listed = [{"session_id": session_id, "session_api_key": key} for session_id, key in opened]
    return JSONResponse({"group_id": group.group_id, "sessions": listed}, status_code=201)


def _check_choice(access: Access, key: str) -> None:
    """Raises RequestError 400 for a key that has another use."""
    if access.opens_more(key) or key.startswith(authentication.FIXED):
        raise RequestError(400, "this key cannot be a session's", code="invalid_api_key", param="api_key")


@router.post("/rl/set_reward")
async def set_reward(body: RewardBody, request: Request) -> Json:
    """Append a reward; `applied` is false when it came too late. 400 for a call that was not delivered."""
    store = app_parts.store(request)
    session_id = await app_parts.finder(request).of_call(request)
    try:
        answer = await store.write(
            areal_sessions.reward,
            session_id,
            store.limits,
            value=body.reward,
            interaction_id=body.interaction_id,
            idempotency_key=authentication.repeat_key(request),
        )
    except RequestError as refused:
        if refused.code in ("interaction_not_found", "interaction_incomplete"):  # AReaL's clients expect 400
            raise RequestError(400, str(refused), code=refused.code, param=refused.param) from refused
        raise
    return {
        "message": "success",
        "applied": answer.applied,
        "interaction_count": answer.interactions,
        "session_id": session_id,
        "trajectory_id": ONLY_TRAJECTORY,
        "trajectory_ready": True,
        "ready_transition": answer.first,
    }


@router.post("/rl/end_session")
async def end_session(request: Request) -> Json:
    """Seal the session. Ending twice is harmless."""
    session_id = await app_parts.finder(request).of_call(request)
    await app_parts.ends(request).end(session_id)
    delivered = await app_parts.store(request).read(areal_sessions.delivered, session_id)
    return {"message": "success", "interaction_count": len(delivered)}


def _without_version(path: str, handle: Callable[[Request], Awaitable[Any]]) -> None:
    """Serve a model route under AReaL's path too; to its handler the request looks like one to /v1."""

    async def endpoint(request: Request) -> Response:
        scope = {**request.scope, "path": path, "raw_path": path.encode(), model_routes.AREALS: True}
        response: Response = await handle(Request(scope, request.receive))
        return response

    router.add_route(path.removeprefix("/v1"), endpoint, ["POST"], include_in_schema=False)


for _path in ("/v1/chat/completions", "/v1/completions", "/v1/responses"):
    _without_version(_path, counted(DIALECTS[_path], model_routes.endpoint(DIALECTS[_path])))
