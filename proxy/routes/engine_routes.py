"""The fleet of engines: one joins or leaves while the run goes on, or is drained; all release their GPU memory.

A drained engine finishes its calls and gets no more, from any replica.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field

from agentrl.configs.engine_config import BackendName, engine_address, engine_url
from agentrl.domain.schemas import Json
from agentrl.environment import ADMIN_KEY
from agentrl.errors import ConfigError, RequestError
from agentrl.proxy.access.authentication import Power
from agentrl.proxy.access.request_bounds import MAX_INT32
from agentrl.proxy.engines import gpu_turns
from agentrl.proxy.engines.engine_state import Engine
from agentrl.proxy.routes import app_parts
from agentrl.proxy.routes.authenticated_bodies import GuardedRoute
from agentrl.store import engine_claims, fleet

router = APIRouter(tags=["admin"], route_class=GuardedRoute)


class EngineBody(BaseModel):
    """Names an engine by its URL."""

    model_config = ConfigDict(extra="forbid")

    url: Annotated[str, Field(max_length=300)]


class JoinBody(EngineBody):
    """An engine that joins, or renews its lease."""

    lease_s: Annotated[float, Field(ge=1, le=3600, allow_inf_nan=False)] = 30.0
    key_digest: Annotated[str, Field(max_length=64)] | None = None
    """The SHA-256 of the key of an engine that requires the key derived from the admin key and its URL."""
    backend: BackendName | None = None
    """The kind of the engine's server; null: the run's `engine.backend`."""


class TurnBody(BaseModel):
    """A trainer, by its epoch, that takes or ends its turn on the engines' GPUs."""

    model_config = ConfigDict(extra="forbid")

    epoch: Annotated[int, Field(ge=0, le=MAX_INT32)]


class ReleaseBody(TurnBody):
    """A trainer's turn lasts `lease_s`, unless it is renewed."""

    lease_s: Annotated[float, Field(ge=1, le=3600, allow_inf_nan=False)] = 30.0


@router.post("/api/engines/release")
async def release(body: ReleaseBody, request: Request) -> Json:
    """Release the GPU memory of all engines, for a trainer on the same GPUs. Calls wait; asking again renews the lease.

    Ends by `/admin/publish`, `/api/engines/reload`, or the end of the lease.
    """
    await app_parts.access(request).require(request, Power.ADMIN)
    return await gpu_turns.release(app_parts.store(request), app_parts.pool(request), body.epoch, body.lease_s)


@router.post("/api/engines/reload")
async def reload(body: TurnBody, request: Request) -> Json:
    """Let all engines take back their GPU memory and load the run's version."""
    await app_parts.access(request).require(request, Power.ADMIN)
    return await gpu_turns.reload(app_parts.store(request), app_parts.pool(request), body.epoch)


@router.post("/api/engines/join")
async def join(body: JoinBody, request: Request) -> Json:
    """Let an engine join the run, or renew its lease. It gets calls once it has the run's version.

    The proxies send it the key of AGENTRL_ENGINE_KEYS or AGENTRL_ENGINE_KEY, or, if it gives the digest of it, the key
    that is derived from the admin key. Raises RequestError 400 for an address that is not one, for an engine off
    loopback without a key, and for a key derived from another admin key.
    """
    await app_parts.access(request).require(request, Power.ADMIN)
    store, pool, url = app_parts.store(request), app_parts.pool(request), engine_url(body.url)
    connections, has_own = app_parts.engine_connections(request), body.key_digest is not None
    try:
        connections.keys.check([body.url], has_own=has_own)
    except ConfigError as error:
        raise RequestError(400, str(error), code="engine_refused", param="url") from error
    if body.key_digest is not None and not connections.keys.derives(url, body.key_digest):
        message = f"the key of this engine was derived from another admin key or URL than {ADMIN_KEY} and {url}"
        raise RequestError(400, message, code="engine_refused", param="key_digest")
    backend = body.backend or engine_address(body.url).backend or connections.backend
    until = await store.write(fleet.join, store.run_id, url, body.lease_s, store.replica, has_own, backend)
    return {"url": url, "leased_until": until, "engines": len(pool.engines)}


@router.post("/api/engines/leave")
async def leave(body: EngineBody, request: Request) -> Json:
    """Take an engine that has joined out of the run: it gets no more calls."""
    await app_parts.access(request).require(request, Power.ADMIN)
    store, url = app_parts.store(request), engine_url(body.url)
    return {"url": url, "left": await store.write(fleet.leave, store.run_id, url, store.replica)}


@router.post("/api/engines/drain")
async def drain(body: EngineBody, request: Request) -> Json:
    """Send an engine no more calls; those that it has continue."""
    return await _set(request, body.url, draining=True)


@router.post("/api/engines/resume")
async def resume(body: EngineBody, request: Request) -> Json:
    """Send a drained engine calls again."""
    return await _set(request, body.url, draining=False)


async def _set(request: Request, url: str, *, draining: bool) -> Json:
    """Drain or resume an engine. Raises RequestError 404 for an engine that the run does not have."""
    await app_parts.access(request).require(request, Power.ADMIN)
    store, pool = app_parts.store(request), app_parts.pool(request)
    url = engine_url(url)
    await store.write(engine_claims.set_draining, store.run_id, url, draining, store.replica)
    await pool.read_fleet()
    mine: Engine | None = next((engine for engine in pool.engines if engine.url == url), None)
    return {"url": url, "draining": draining, "running": 0 if mine is None else mine.running}
