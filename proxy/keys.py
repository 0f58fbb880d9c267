"""Who is calling: admin, run and session keys are different powers. The store holds only their hashes."""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
from dataclasses import dataclass
from enum import StrEnum

from starlette.requests import Request

from agentrl.errors import RequestError
from agentrl.proxy.state import ProxyState
from agentrl.store import sessions
from agentrl.store.codec import hash_key

PARENT_HEADER = "x-parent-session-id"
LONGEST_REPEAT_KEY = 200


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


@dataclass(frozen=True, slots=True)
class Start:
    """A request that opens sessions; `digest` names it when it carries an `Idempotency-Key` and so may be repeated.

    The store holds only hashes of keys, so a repeated start could not be told its keys: they are derived from the
    caller's own key and the digest, and whoever can send the request again gets them again.
    """

    digest: str | None
    secret: str

    def session_key(self, index: int) -> str:
        """The key of the session with this sample index; its prefix tells people which kind it is."""
        code = hmac.digest(self.secret.encode(), f"session {self.digest} {index}".encode(), "sha256")
        return f"arl-{Power.SESSION}-{base64.urlsafe_b64encode(code[:24]).decode()}"


async def start_of(request: Request, state: ProxyState) -> Start:
    """What a start is to be known by: the run, the route, the caller, its `Idempotency-Key` and the body."""
    repeat = repeat_key(request)
    if repeat is None:
        return Start(None, secrets.token_urlsafe(24))
    caller = key_of(request)
    parts = [state.run_id, request.url.path, hash_key(caller), repeat, request.headers.get(PARENT_HEADER, "")]
    known = hashlib.blake2b("\0".join(parts).encode() + b"\0" + await request.body(), digest_size=16)
    return Start(known.hexdigest(), caller)


def repeat_key(request: Request) -> str | None:
    """The `Idempotency-Key` of a request. Raises RequestError 422 when it is too long to be kept."""
    key = request.headers.get("idempotency-key")
    if key is not None and len(key) > LONGEST_REPEAT_KEY:
        raise RequestError(
            422, f"an Idempotency-Key has at most {LONGEST_REPEAT_KEY} characters", code="invalid_parameter",
            param="Idempotency-Key",
        )  # fmt: skip
    return key


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
        session_id = await state.read(sessions.by_key_hash, state.run_id, hashed)
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
    """Authenticate for one session: its own key, its run's or the admin's. Raises RequestError 401, 403 or 404."""
    caller = await authenticate(request, state)
    if caller.power is Power.SESSION:
        if caller.session_id != session_id:
            raise RequestError(403, "this key belongs to another session", code="forbidden")
    elif await state.read(sessions.run_of, session_id) != state.run_id:
        raise RequestError(404, f"no session {session_id!r}", code="session_not_found")
    return caller
