"""Records of keys: what each opens, and until when. Only hashes are stored.

A run's first key is `runs.key_hash`, a session's first key is `sessions.key_hash`. Every further key is a row of
`keys`, and so is a first key that was revoked or that expires: a row overrides those columns.
"""

from __future__ import annotations

import math
import secrets
import time
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row, insert, select, update

from agentrl.domain.schemas import Json, Power, SessionStatus
from agentrl.errors import RequestError, bad_parameter, no_session
from agentrl.store import runs
from agentrl.store.db.codec import hash_key, new_id
from agentrl.store.tables import keys, sessions

FIRST = "first"
"""Id and name of the key that a run was created with."""
SKEW_S = 600.0
"""How much the clocks of two replicas may differ before one misses a change that the other made."""


@dataclass(frozen=True, slots=True)
class Key:
    """The power of a key, and the session that it opens, if any; `ends_at`: seconds since the epoch, or infinite."""

    power: Power
    session_id: str | None = None
    ends_at: float = math.inf
    revoked: bool = False


@dataclass(frozen=True, slots=True)
class Made:
    """A new key in clear text; the store keeps only its hash."""

    id: str
    power: Power
    name: str
    key: str
    expires_at: float | None


def new_key(power: Power) -> str:
    """A random key of 192 bits; scanners for secrets find it by `arl-(admin|run|session)-[A-Za-z0-9_-]{32}`."""
    return f"arl-{power}-{secrets.token_urlsafe(24)}"


def create(conn: Connection, run_id: str, power: Power, name: str, expires_at: float | None = None) -> Made:
    """Create an admin or run key. Raises RequestError 422 for a session's power, a bad name or an end in the past."""
    if power is Power.SESSION:
        raise bad_parameter(
            "power", "a session's key comes with its session, and is rotated by POST /sessions/ID/key", 422
        )
    if not 0 < len(name) <= 100 or not name.isprintable():
        raise bad_parameter("name", "a key's name has 1 to 100 printable characters", 422)
    return _insert(conn, run_id, power, name, expires_at)


def rotate(
    conn: Connection, run_id: str, which: str, *, overlap_s: float | None = None, expires_at: float | None = None
) -> Made:
    """Create a key with the name and power of an old one, which expires after `overlap_s`, or by revocation if None.

    Raises RequestError as `resolve` and `create` do, 409 for a key that has ended.
    """
    old = resolve(conn, run_id, which)
    now = time.time()
    if _state(old, now) != "valid":
        raise RequestError(409, f"key {which!r} is {_state(old, now)}: make a new one", code="key_ended")
    made = _insert(conn, run_id, Power(old["power"]), old["name"], expires_at)
    if overlap_s is not None:
        _end(conn, run_id, old, now + overlap_s)
    return made


def rotate_session(
    conn: Connection, run_id: str, session_id: str, *, overlap_s: float = 0.0, expires_at: float | None = None
) -> Made:
    """Give an open session a new key; its earlier keys expire after `overlap_s`.

    Raises RequestError: 404 for an unknown session, 409 when it has ended, 422 for an end in the past.
    """
    session = conn.execute(
        select(sessions.c.status, sessions.c.key_hash, sessions.c.created_at)
        .where(sessions.c.id == session_id, sessions.c.run_id == run_id)
        .with_for_update()
    ).first()
    if session is None:
        raise no_session(session_id)
    if session.status != SessionStatus.OPEN:
        raise RequestError(409, f"session {session_id} is sealed: it has ended", code="session_sealed")
    own = [dict(row._mapping) for row in conn.execute(select(keys).where(keys.c.session_id == session_id))]
    if all(row["key_hash"] != session.key_hash for row in own):
        own.append(_first(Power.SESSION, session, session_id))
    for row in own:
        _end(conn, run_id, row, time.time() + overlap_s)
    return _insert(conn, run_id, Power.SESSION, "rotated", expires_at, session_id)


def revoke(conn: Connection, run_id: str, which: str) -> str:
    """End a key at once; returns its id. Revoking twice is harmless. Raises RequestError as `resolve` does."""
    row = resolve(conn, run_id, which)
    key_id = _stored(conn, run_id, row)
    if row["revoked_at"] is None:
        now = time.time()
        conn.execute(update(keys).where(keys.c.id == key_id).values(revoked_at=now, changed_at=now))
    return key_id


def listing(conn: Connection, run_id: str) -> list[Json]:
    """The admin and run keys of a run, oldest first, ended ones included; without hashes."""
    now = time.time()
    shown = ("id", "name", "power", "created_at", "expires_at", "revoked_at")
    return [{name: row[name] for name in shown} | {"state": _state(row, now)} for row in _of_run(conn, run_id)]


def resolve(conn: Connection, run_id: str, which: str) -> Json:
    """An admin or run key by its id, or a valid one by its name. Raises RequestError 404; 409 if several match."""
    now = time.time()
    rows = _of_run(conn, run_id)
    found = [row for row in rows if row["id"] == which]
    found = found or [row for row in rows if row["name"] == which and _state(row, now) == "valid"]
    if not found:
        raise RequestError(404, f"no key {which!r}", code="key_not_found")
    if len(found) > 1:
        ids = ", ".join(row["id"] for row in found)
        raise RequestError(409, f"several keys are called {which!r}: name one by its id ({ids})", code="ambiguous_key")
    return found[0]


def find(conn: Connection, run_id: str, key_hash: str) -> Key | None:
    """The access that a key gives; None for an unknown key."""
    row = conn.execute(select(keys).where(keys.c.run_id == run_id, keys.c.key_hash == key_hash)).first()
    if row is not None:
        return _key(row)
    of_session = select(sessions.c.id).where(sessions.c.key_hash == key_hash, sessions.c.run_id == run_id)
    session_id = conn.execute(of_session).scalar()
    if session_id is not None:
        return Key(Power.SESSION, session_id)
    return Key(Power.RUN) if runs.get(conn, run_id).key_hash == key_hash else None


def admin_and_run_keys(conn: Connection, run_id: str) -> dict[str, Key]:
    """Every admin and run key by hash, ended ones included."""
    found = {runs.get(conn, run_id).key_hash: Key(Power.RUN)}
    rows = conn.execute(select(keys).where(keys.c.run_id == run_id, keys.c.session_id.is_(None)))
    return found | {row.key_hash: _key(row) for row in rows}


def changed_of_sessions(conn: Connection, run_id: str, since: float) -> dict[str, Key]:
    """The session keys created or changed after `since`, by hash."""
    changed = (keys.c.run_id == run_id, keys.c.changed_at > since - SKEW_S, keys.c.session_id.is_not(None))
    return {row.key_hash: _key(row) for row in conn.execute(select(keys).where(*changed))}


@dataclass(frozen=True, slots=True)
class Changes:
    """A run's keys by hash: all admin and run keys, and those session keys that changed."""

    read_at: float
    of_everybody: dict[str, Key]
    of_sessions: dict[str, Key]


def changes(conn: Connection, run_id: str, since: float) -> Changes:
    """Read the admin and run keys, and the session keys that changed after `since` (seconds since the epoch)."""
    now = time.time()
    changed = changed_of_sessions(conn, run_id, since)
    return Changes(now, admin_and_run_keys(conn, run_id), changed)


def _of_run(conn: Connection, run_id: str) -> list[Json]:
    run = runs.get(conn, run_id)
    rows = conn.execute(
        select(keys).where(keys.c.run_id == run_id, keys.c.session_id.is_(None)).order_by(keys.c.created_at, keys.c.id)
    )
    found = [dict(row._mapping) for row in rows]
    if all(row["key_hash"] != run.key_hash for row in found):
        found.insert(0, _first(Power.RUN, run))
    return found


def _first(power: Power, owner: Any, session_id: str | None = None) -> Json:
    """The key that a run or a session was created with, as a row of `keys`."""
    first = {"id": FIRST, "name": FIRST, "power": power.value, "session_id": session_id}
    return first | {"created_at": owner.created_at, "key_hash": owner.key_hash, "expires_at": None, "revoked_at": None}


def _insert(
    conn: Connection, run_id: str, power: Power, name: str, expires_at: float | None, session_id: str | None = None
) -> Made:
    now = time.time()
    if expires_at is not None and not now < expires_at < math.inf:
        raise bad_parameter("expires_at", "the key's expiry must be in the future", 422)
    made = Made(new_id(), power, name, new_key(power), expires_at)
    conn.execute(
        insert(keys).values(
            id=made.id,
            run_id=run_id,
            session_id=session_id,
            power=power.value,
            name=name,
            key_hash=hash_key(made.key),
            created_at=now,
            changed_at=now,
            expires_at=expires_at,
        )
    )
    return made


def _end(conn: Connection, run_id: str, row: Json, ends_at: float) -> None:
    """Set the end of a key, unless it ends earlier."""
    if row["expires_at"] is None or row["expires_at"] > ends_at:
        ending = update(keys).where(keys.c.id == _stored(conn, run_id, row))
        conn.execute(ending.values(expires_at=ends_at, changed_at=time.time()))


def _stored(conn: Connection, run_id: str, row: Json) -> str:
    """The id of a key's row, which is inserted for a first key."""
    if row["id"] != FIRST:
        return str(row["id"])
    key_id = new_id()
    conn.execute(
        insert(keys).values(
            id=key_id,
            run_id=run_id,
            session_id=row["session_id"],
            power=row["power"],
            name=row["name"],
            key_hash=row["key_hash"],
            created_at=row["created_at"],
            changed_at=time.time(),
        )
    )
    return key_id


def _key(row: Row[Any]) -> Key:
    ends = [at for at in (row.expires_at, row.revoked_at) if at is not None]
    return Key(Power(row.power), row.session_id, min(ends, default=math.inf), row.revoked_at is not None)


def _state(row: Json, now: float) -> str:
    if row["revoked_at"] is not None:
        return "revoked"
    return "expired" if row["expires_at"] is not None and row["expires_at"] <= now else "valid"
