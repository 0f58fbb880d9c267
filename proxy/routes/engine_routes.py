"""Engines that somebody wants to take down: they finish what they have and get no more, from any replica."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field

from agentrl.domain.schemas import Json
from agentrl.proxy.access import authentication
from agentrl.proxy.engines.engine_state import Engine
from agentrl.proxy.routes.authenticated_bodies import GuardedRoute
from agentrl.proxy.state import ProxyState
from agentrl.store import engine_turns

router = APIRouter(tags=["admin"], route_class=GuardedRoute)


class EngineBody(BaseModel):
    """The engine that is meant."""

    model_config = ConfigDict(extra="forbid")

    url: Annotated[str, Field(max_length=300)]


@router.post("/api/engines/drain")
async def drain(body: EngineBody, request: Request) -> Json:
    """Give an engine no more calls; those that it has go on."""
    return await _set(request, body.url, draining=True)


@router.post("/api/engines/resume")
async def resume(body: EngineBody, request: Request) -> Json:
    """Give a drained engine calls again."""
    return await _set(request, body.url, draining=False)


async def _set(request: Request, url: str, *, draining: bool) -> Json:
    """Raises RequestError 404 for an engine that the run does not have."""
    state: ProxyState = request.app.state.proxy
    authentication.require(await authentication.authenticate(request, state), authentication.Power.ADMIN)
    url = url.rstrip("/")
    await state.write(engine_turns.set_draining, state.run_id, url, draining, state.replica)
    await state.pool.read_drains()
    mine: Engine | None = next((engine for engine in state.pool.engines if engine.url == url), None)
    return {"url": url, "draining": draining, "running": 0 if mine is None else mine.running}
