"""Draining engines: a drained engine finishes its calls and gets no more, from any replica."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field

from agentrl.domain.schemas import Json
from agentrl.proxy.access.authentication import Power
from agentrl.proxy.engines.engine_state import Engine
from agentrl.proxy.routes import app_parts
from agentrl.proxy.routes.authenticated_bodies import GuardedRoute
from agentrl.store import engine_turns

router = APIRouter(tags=["admin"], route_class=GuardedRoute)


class EngineBody(BaseModel):
    """Names an engine by its URL."""

    model_config = ConfigDict(extra="forbid")

    url: Annotated[str, Field(max_length=300)]


@router.post("/api/engines/drain")
async def drain(body: EngineBody, request: Request) -> Json:
    """Send an engine no more calls; those that it has continue."""
    return await _set(request, body.url, draining=True)


@router.post("/api/engines/resume")
async def resume(body: EngineBody, request: Request) -> Json:
    """Send a drained engine calls again."""
    return await _set(request, body.url, draining=False)


async def _set(request: Request, url: str, *, draining: bool) -> Json:
    """Raises RequestError 404 for an engine that the run does not have."""
    await app_parts.access(request).require(request, Power.ADMIN)
    store, pool = app_parts.store(request), app_parts.pool(request)
    url = url.rstrip("/")
    await store.write(engine_turns.set_draining, store.run_id, url, draining, store.replica)
    await pool.read_drains()
    mine: Engine | None = next((engine for engine in pool.engines if engine.url == url), None)
    return {"url": url, "draining": draining, "running": 0 if mine is None else mine.running}
