"""Create, rotate and revoke keys: `/api/keys` for admins, `/sessions/{session_id}/key` for the run."""

from __future__ import annotations

import time
from dataclasses import asdict

from fastapi import APIRouter, Request
from pydantic import Field

from agentrl.domain.schemas import Json
from agentrl.proxy.access import authentication
from agentrl.proxy.access.authentication import Power
from agentrl.proxy.routes import app_parts
from agentrl.proxy.routes.authenticated_bodies import GuardedRoute
from agentrl.proxy.routes.request_bodies import Body
from agentrl.proxy.run_store import RunStore
from agentrl.store import key_records

router = APIRouter(tags=["keys"], route_class=GuardedRoute)
LONGEST_S = 3.2e9  # a century


class KeyBody(Body):
    """A new admin or run key. It expires after `expires_in_s`, or never."""

    power: Power
    name: str = Field(min_length=1, max_length=100)
    expires_in_s: float | None = Field(default=None, gt=0, le=LONGEST_S)


class RotateBody(Body):
    """The old key expires after `overlap_s`; without it, the old key stays valid until it is revoked."""

    overlap_s: float | None = Field(default=None, ge=0, le=LONGEST_S)
    expires_in_s: float | None = Field(default=None, gt=0, le=LONGEST_S)


class SessionKeyBody(Body):
    """The session's earlier keys expire after `overlap_s`."""

    overlap_s: float = Field(default=0.0, ge=0, le=LONGEST_S)
    expires_in_s: float | None = Field(default=None, gt=0, le=LONGEST_S)


async def _of_admin(request: Request) -> RunStore:
    await app_parts.access(request).require(request, Power.ADMIN)
    return app_parts.store(request)


def _end(expires_in_s: float | None) -> float | None:
    return None if expires_in_s is None else time.time() + expires_in_s


@router.post("/api/keys", status_code=201)
async def make_key(body: KeyBody, request: Request) -> Json:
    """Create an admin or run key. Only this answer shows the key itself."""
    store = await _of_admin(request)
    made = await store.write(key_records.create, store.run_id, body.power, body.name, _end(body.expires_in_s))
    await app_parts.access(request).refresh()
    return asdict(made)


@router.get("/api/keys")
async def list_keys(request: Request) -> list[Json]:
    """The admin and run keys, ended ones included, without the keys themselves."""
    store = await _of_admin(request)
    return await store.read(key_records.listing, store.run_id)


@router.post("/api/keys/{key}/rotate", status_code=201)
async def rotate_key(key: str, body: RotateBody, request: Request) -> Json:
    """Replace the key with this id or name by a new one."""
    store = await _of_admin(request)
    made = await store.write(
        key_records.rotate, store.run_id, key, overlap_s=body.overlap_s, expires_at=_end(body.expires_in_s)
    )
    await app_parts.access(request).refresh()
    return asdict(made)


@router.delete("/api/keys/{key}")
async def revoke_key(key: str, request: Request) -> Json:
    """Revoke the key with this id or name: at once here, within seconds at every replica."""
    store = await _of_admin(request)
    key_id = await store.write(key_records.revoke, store.run_id, key)
    await app_parts.access(request).refresh()
    return {"id": key_id, "state": "revoked"}


@router.post("/sessions/{session_id}/key", status_code=201)
async def rotate_session_key(session_id: str, body: SessionKeyBody, request: Request) -> Json:
    """Give an open session a new key. Needs a run or admin key, so that a stolen session key cannot renew itself."""
    store = app_parts.store(request)
    caller = await app_parts.access(request).session_caller(request, session_id)
    authentication.require(caller, Power.RUN, Power.ADMIN)
    made = await store.write(
        key_records.rotate_session,
        store.run_id,
        session_id,
        overlap_s=body.overlap_s,
        expires_at=_end(body.expires_in_s),
    )
    await app_parts.access(request).refresh()
    return {"session_id": session_id, "api_key": made.key, "expires_at": made.expires_at}
