"""Who is calling: admin, run and session keys are different powers. The store holds only their hashes.

A key is hashed once and looked up in the `Keyring`; only one that it does not know asks the database.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
import time
from dataclasses import dataclass

from starlette.requests import Request

from agentrl.domain.schemas import Power as Power
from agentrl.errors import RequestError
from agentrl.proxy.access.keyring import Caller as Caller
from agentrl.proxy.access.keyring import as_known
from agentrl.proxy.access.request_bounds import LONGEST_KEY
from agentrl.proxy.state import ProxyState
from agentrl.store import key_records as store
from agentrl.store.db.codec import hash_key
from agentrl.store.sessions import session_lookup

PARENT_HEADER = "x-parent-session-id"
REUSABLE = "areal"
"""Kind of a session's key that may open another session once its own has ended (AReaL's)."""
FIXED = "arl-session-"
"""What a key begins with that opens one session for ever: only such a key's session is remembered."""


@dataclass(frozen=True, slots=True)
class Start:
    """A request that opens sessions; `digest` names it when it carries an `Idempotency-Key` and so may be repeated.

    The store holds only hashes of keys, so a repeated start could not be told its keys: they are derived from the
    caller's own key and the digest, and whoever can send the request again gets them again.
    """

    digest: str | None
    secret: str

    def session_key(self, index: int, kind: str = Power.SESSION) -> str:
        """The key of the session with this sample index; its prefix tells people which kind it is."""
        code = hmac.digest(self.secret.encode(), f"session {self.digest} {index}".encode(), "sha256")
        return f"arl-{kind}-{base64.urlsafe_b64encode(code[:24]).decode()}"


async def start_of(request: Request, state: ProxyState) -> Start:
    """What a start is to be known by: the run, the route, the caller, its `Idempotency-Key` and the body."""
    repeat = repeat_key(request)
    if repeat is None:
        return Start(None, secrets.token_urlsafe(24))
    caller = key_of(request)
    parts = [state.run_id, request.url.path, hash_key(caller), repeat, request.headers.get(PARENT_HEADER, "")]
    known = hashlib.blake2b("\0".join(parts).encode() + b"\0" + await request.body(), digest_size=16)
    return Start(known.hexdigest(), caller)


def claim_of(request: Request, state: ProxyState, claim: str) -> Start:
    """What a start that claims a name is to be known by: the name alone, whoever claims it."""
    known = hashlib.blake2b(f"{state.run_id}\0claim\0{claim}".encode(), digest_size=16)
    return Start(known.hexdigest(), key_of(request))


def repeat_key(request: Request) -> str | None:
    """The `Idempotency-Key` of a request. Raises RequestError 400 when it is too long to be kept."""
    key = request.headers.get("idempotency-key")
    if key is not None and len(key) > LONGEST_KEY:
        raise RequestError(
            400,
            f"an Idempotency-Key has at most {LONGEST_KEY} characters",
            code="invalid_parameter",
            param="Idempotency-Key",
        )
    return key


def key_of(request: Request) -> str:
    """The key of a request. Raises RequestError 401 when there is none."""
    scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
    key = bearer if scheme.lower() == "bearer" and bearer else request.headers.get("x-api-key", "")
    if not key:
        raise RequestError(401, "no API key: send `Authorization: Bearer KEY` or `x-api-key`", code="missing_api_key")
    return key


async def authenticate(request: Request, state: ProxyState) -> Caller:
    """Tell who calls. Raises RequestError 401 for a missing, unknown, expired or revoked key."""
    key = key_of(request)
    hashed = hash_key(key)
    known = state.keyring.get(hashed)
    if known is None:
        found = await state.read(store.find, state.run_id, hashed)
        if found is None:
            raise RequestError(401, "the API key is not valid", code="invalid_api_key")
        if found.power is Power.SESSION and key.startswith(FIXED):
            known = state.keyring.remember(hashed, found)
        else:
            known = as_known(found)
    if known.ends_at <= time.time():
        ended = "revoked" if known.revoked else "expired"
        raise RequestError(401, f"the API key has {'been ' * known.revoked}{ended}", code=f"{ended}_api_key")
    return known.caller


def opens_more(state: ProxyState, key: str) -> bool:
    """Whether a key is an admin's or the run's, valid or not."""
    known = state.keyring.get(hash_key(key))
    return known is not None and known.caller.power is not Power.SESSION


def require(caller: Caller, *powers: Power) -> None:
    """Raise RequestError 403 unless the caller has one of `powers`."""
    if caller.power not in powers:
        raise RequestError(403, f"this key's power is {caller.power}: it takes {' or '.join(powers)}", code="forbidden")


async def session_caller(request: Request, state: ProxyState, session_id: str) -> Caller:
    """Authenticate for one session: its own key, its run's or the admin's. Raises RequestError 401, 403 or 404."""
    caller = await authenticate(request, state)
    if caller.power is Power.SESSION:
        if caller.session_id != session_id:
            raise RequestError(403, "this key belongs to another session", code="forbidden")
    elif await state.read(session_lookup.run_of, session_id) != state.run_id:
        raise RequestError(404, f"no session {session_id!r}", code="session_not_found")
    return caller
