"""Authentication: admin, run and session keys have different powers. The store holds only their hashes.

A key is hashed once and looked up in the `Keyring`; only a key that the keyring does not hold needs a read of the
database.
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
from agentrl.errors import RequestError, bad_parameter, no_session
from agentrl.proxy.access.keyring import Caller as Caller
from agentrl.proxy.access.keyring import Keyring, as_known
from agentrl.proxy.access.request_bounds import LONGEST_KEY
from agentrl.proxy.run_store import RunStore
from agentrl.store import key_records
from agentrl.store.db.codec import hash_key
from agentrl.store.sessions import session_lookup

PARENT_HEADER = "x-parent-session-id"
REUSABLE = "areal"
"""Kind of a session key that may open another session once its own has ended (AReaL's)."""
FIXED = "arl-session-"
"""Prefix of a key that opens one session forever: the keyring keeps only such session keys."""


@dataclass(frozen=True, slots=True)
class Start:
    """A request that opens sessions; `digest` identifies it when it carries an `Idempotency-Key` and may be repeated.

    The store holds only hashes of keys, so it cannot return the keys of a repeated start. They are therefore derived
    from the caller's own key and the digest: a caller that can repeat the request gets the same keys.
    """

    digest: str | None
    secret: str

    def session_key(self, index: int, kind: str = Power.SESSION) -> str:
        """The key of the session with this sample index; its prefix shows which kind it is."""
        code = hmac.digest(self.secret.encode(), f"session {self.digest} {index}".encode(), "sha256")
        return f"arl-{kind}-{base64.urlsafe_b64encode(code[:24]).decode()}"


@dataclass(frozen=True, slots=True)
class Access:
    """Authenticates requests against the keyring and the store."""

    keyring: Keyring
    store: RunStore

    async def authenticate(self, request: Request) -> Caller:
        """The caller of a request. Raises RequestError 401 for a missing, unknown, expired or revoked key."""
        key = key_of(request)
        return await self.caller(hash_key(key), fixed=key.startswith(FIXED))

    async def caller(self, hashed: str, *, fixed: bool = False) -> Caller:
        """The caller with the key of this hash; `fixed` keys open one session forever. Raises RequestError 401."""
        known = self.keyring.get(hashed)
        if known is None:
            found = await self.store.read(key_records.find, self.store.run_id, hashed)
            if found is None:
                raise RequestError(401, "the API key is not valid", code="invalid_api_key")
            lasts = found.power is Power.SESSION and fixed
            known = self.keyring.remember(hashed, found) if lasts else as_known(found)
        if known.ends_at <= time.time():
            ended = "revoked" if known.revoked else "expired"
            raise RequestError(401, f"the API key has {'been ' * known.revoked}{ended}", code=f"{ended}_api_key")
        return known.caller

    async def require(self, request: Request, *powers: Power) -> Caller:
        """The caller of a request that requires one of `powers`. Raises RequestError 401, 403."""
        caller = await self.authenticate(request)
        require(caller, *powers)
        return caller

    async def session_caller(self, request: Request, session_id: str) -> Caller:
        """The caller of a request for one session, with the session's key, a run key or an admin key.

        Raises RequestError 401, 403, 404.
        """
        caller = await self.authenticate(request)
        if caller.power is Power.SESSION:
            if caller.session_id != session_id:
                raise RequestError(403, "this key belongs to another session", code="forbidden")
        elif await self.store.read(session_lookup.run_of, session_id) != self.store.run_id:
            raise no_session(session_id)
        return caller

    def opens_more(self, key: str) -> bool:
        """Whether a key is an admin or run key, expired ones included."""
        known = self.keyring.get(hash_key(key))
        return known is not None and known.caller.power is not Power.SESSION

    async def refresh(self) -> None:
        """Read the keys that changed. Raises StoreError."""
        await self.keyring.refresh(self.store)


def require(caller: Caller, *powers: Power) -> None:
    """Raise RequestError 403 unless the caller has one of `powers`."""
    if caller.power not in powers:
        raise RequestError(
            403, f"this key's power is {caller.power}; this route requires {' or '.join(powers)}", code="forbidden"
        )


async def start_of(request: Request, run_id: str) -> Start:
    """Identify a start by the run, the route, the caller, its `Idempotency-Key` and the body."""
    repeat = repeat_key(request)
    if repeat is None:
        return Start(None, secrets.token_urlsafe(24))
    caller = key_of(request)
    parts = [run_id, request.url.path, hash_key(caller), repeat, request.headers.get(PARENT_HEADER, "")]
    known = hashlib.blake2b("\0".join(parts).encode() + b"\0" + await request.body(), digest_size=16)
    return Start(known.hexdigest(), caller)


def claim_of(request: Request, run_id: str, claim: str) -> Start:
    """Identify a start by the name that it claims; it is the same start for every worker."""
    known = hashlib.blake2b(f"{run_id}\0claim\0{claim}".encode(), digest_size=16)
    return Start(known.hexdigest(), key_of(request))


def repeat_key(request: Request) -> str | None:
    """The `Idempotency-Key` of a request. Raises RequestError 400 when it is too long to be stored."""
    key = request.headers.get("idempotency-key")
    if key is not None and len(key) > LONGEST_KEY:
        raise bad_parameter("Idempotency-Key", f"an Idempotency-Key has at most {LONGEST_KEY} characters")
    return key


def key_of(request: Request) -> str:
    """The API key of a request. Raises RequestError 401 when there is none."""
    scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
    key = bearer if scheme.lower() == "bearer" and bearer else request.headers.get("x-api-key", "")
    if not key:
        raise RequestError(401, "no API key: send `Authorization: Bearer KEY` or `x-api-key`", code="missing_api_key")
    return key
