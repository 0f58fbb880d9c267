"""Who is calling: admin, run and session keys are different powers. The store holds only their hashes."""

from __future__ import annotations

import hmac
import secrets
from dataclasses import dataclass
from enum import StrEnum

from starlette.requests import Request

from agentrl.errors import RequestError
from agentrl.proxy.state import ProxyState
from agentrl.store import sessions
from agentrl.store.codec import hash_key


class Power(StrEnum):
    """What a key may do."""

    ADMIN = "admin"  # publish weights, and all that a run key may
    RUN = "run"  # start sessions, reward and end any of them, look at the run
    SESSION = "session"  # call the model in one session, reward it, end it


@dataclass(frozen=True, slots=True)
class Caller:
    """An authenticated caller; `session_id` is set for a session key."""

    power: Power
    session_id: str | None = None


def new_key(kind: Power) -> str:
    """A fresh random key; its prefix tells people which kind it is."""
    return f"arl-{kind}-{secrets.token_urlsafe(24)}"


def key_of(request: Request) -> str:
    """The key of a request. Raises RequestError 401 when there is none."""
    scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
    key = bearer if scheme.lower() == "bearer" and bearer else request.headers.get("x-api-key", "")
    if not key:
        raise RequestError(401, "no API key: send `Authorization: Bearer KEY` or `x-api-key`", code="missing_api_key")
    return key


async def authenticate(request: Request, state: ProxyState) -> Caller:
    """Tell who calls. Raises RequestError 401 for a missing or unknown key."""
    key = key_of(request)
    if hmac.compare_digest(key.encode(), state.admin_key.encode()):
        return Caller(Power.ADMIN)
    hashed = hash_key(key)
    if hmac.compare_digest(hashed, state.run_key_hash):
        return Caller(Power.RUN)
    session_id = state.session_keys.get(hashed)
    if session_id is None:
        session_id = await state.read(sessions.by_key_hash, hashed)
        if session_id is None:
            raise RequestError(401, "the API key is not valid", code="invalid_api_key")
        state.session_keys[hashed] = session_id
    return Caller(Power.SESSION, session_id)


def require(caller: Caller, *powers: Power) -> None:
    """Raise RequestError 403 unless the caller has one of `powers`."""
    if caller.power not in powers:
        raise RequestError(
            403, f"a {caller.power} key may not do this: it takes a {' or '.join(powers)} key", code="forbidden"
        )


async def session_caller(request: Request, state: ProxyState, session_id: str) -> Caller:
    """Authenticate for one session: its own key, the run's or the admin's. Raises RequestError 401 or 403."""
    caller = await authenticate(request, state)
    if caller.power is Power.SESSION and caller.session_id != session_id:
        raise RequestError(403, "this key belongs to another session", code="forbidden")
    return caller
