"""The engines that replicas use: which there are, and in which state a replica last saw each.

absent ── join ──► member ── join ──► member      joining again renews the lease
   ▲                 │
   ├──── leave ──────┤
   └─ drop_lost ─────┘   the lease is over and the engine is dead

An engine that still answers stays after its lease: a host that cannot reach the proxies for a while loses nothing.

Every replica reads the fleet once a second: `news`. Each change of a row that replicas must know increases the row's
`changes` and sets its `changed_at`, so the number of rows that a read returns does not grow with the fleet.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sqlalchemy import Connection, and_, delete, func, select, update

from agentrl.domain.schemas import Json
from agentrl.errors import RequestError
from agentrl.store import engine_claims, events
from agentrl.store.db import clock, codec, upsert
from agentrl.store.engine_claims import changed
from agentrl.store.tables import engines, heartbeats, memory_leases, runs

MAX_ENGINES = 10_000
"""Engines of one run."""
OVERLAP_S = 5.0
"""A read repeats the changes of this time before the last one: their transactions may have been committed since."""
CHECKED_S = 5.0
"""An engine is dropped only if it was dead for this time: its watchers have tried to reach it since."""


@dataclass(frozen=True, slots=True)
class Member:
    """An engine as all replicas see it."""

    url: str
    state: str = "dead"
    version: int | None = None
    error: str | None = None
    changes: int = 0
    seen_by: str | None = None  # the replica that saw the state
    draining: bool = False
    updater: str | None = None  # the replica that may change its weights
    updating_until: float | None = None  # seconds since the epoch, by the database's clock; so are all times here
    leased_until: float | None = None  # at the row's last change; None for an engine of the run's start
    own_key: bool = False

    @property
    def joined(self) -> bool:
        """Whether the engine joined by itself."""
        return self.leased_until is not None


_MEMBER = (
    engines.c.url,
    engines.c.state,
    engines.c.version,
    engines.c.error,
    engines.c.changes,
    engines.c.seen_by,
    engines.c.draining,
    engines.c.updater,
    engines.c.updating_until,
    engines.c.leased_until,
    engines.c.own_key,
)


@dataclass(frozen=True, slots=True)
class News:
    """What a replica reads each second."""

    at: float  # when it was read, by the database's clock
    version: int  # the run's
    leased: bool  # a trainer has the engines' GPU memory, or hands it back: `memory_leases`
    gone: int  # engines that have left so far
    whole: bool  # `members` are all engines, not only those that changed
    members: list[Member]
    replicas: Mapping[str, tuple[float, Json]]  # proxies: name → when each was last seen, and what it does


def news(conn: Connection, run_id: str, since: News | None, heard_s: float) -> News:
    """The engines that changed after an earlier read; all of them without one, or if engines have left.

    `replicas` are those that were seen in the last `heard_s` seconds.
    """
    asked = (
        select(runs.c.current_version, runs.c.engines_gone, memory_leases.c.run_id.is_not(None), clock.now())
        .join_from(runs, memory_leases, memory_leases.c.run_id == runs.c.id, isouter=True)
        .where(runs.c.id == run_id)
    )
    version, gone, leased, at = conn.execute(asked).one()
    whole = since is None or since.gone != gone
    rows = select(*_MEMBER).where(engines.c.run_id == run_id)
    if since is not None and not whole:
        rows = rows.where(engines.c.changed_at > since.at - OVERLAP_S)
    proxies = select(heartbeats.c.name, heartbeats.c.last_seen_at, heartbeats.c.about).where(
        heartbeats.c.run_id == run_id, heartbeats.c.kind == "proxy", heartbeats.c.last_seen_at > at - heard_s
    )
    return News(
        at=at,
        version=version,
        leased=leased,
        gone=gone,
        whole=whole,
        members=[Member(*row) for row in conn.execute(rows)],
        replicas={name: (seen_at, about or {}) for name, seen_at, about in conn.execute(proxies)},
    )


def member(conn: Connection, run_id: str, url: str) -> Member | None:
    """One engine."""
    row = conn.execute(select(*_MEMBER).where(engines.c.run_id == run_id, engines.c.url == url)).first()
    return None if row is None else Member(*row)


def join(conn: Connection, run_id: str, url: str, lease_s: float, source: str, own_key: bool = False) -> float:
    """Let an engine join, or renew its lease; returns the lease's end (seconds since the epoch).

    Raises RequestError 409 when the run has MAX_ENGINES engines.
    """
    mine = and_(engines.c.run_id == run_id, engines.c.url == url)
    before = conn.execute(select(engines.c.own_key).where(mine, engines.c.leased_until.is_not(None))).first()
    known = conn.execute(select(func.count()).where(engines.c.run_id == run_id)).scalar_one()
    if before is None and known >= MAX_ENGINES:
        raise RequestError(409, f"the run has {MAX_ENGINES} engines already", code="too_many_engines", param="url")
    values = {"leased_until": clock.now() + lease_s, "own_key": own_key}
    told = values if before is not None and before.own_key == own_key else changed(**values)  # a renewal is no news
    until = conn.scalars(
        upsert.insert(conn, engines)
        .values(run_id=run_id, url=url, **engine_claims.new(**values))
        .on_conflict_do_update(index_elements=["run_id", "url"], set_=told)
        .returning(engines.c.leased_until)
    ).one()
    if before is None:
        events.record(conn, run_id, "engine_joined", {"url": url}, source)
    return float(until)


def leave(conn: Connection, run_id: str, url: str, source: str) -> bool:
    """Take an engine that has joined out of the run; false when it is not a member that joined."""
    gone = conn.execute(
        delete(engines).where(engines.c.run_id == run_id, engines.c.url == url, engines.c.leased_until.is_not(None))
    )
    if gone.rowcount:
        engine_claims.some_left(conn, run_id)
        events.record(conn, run_id, "engine_left", {"url": url, "why": "asked to"}, source)
    return bool(gone.rowcount)


def save(
    conn: Connection,
    run_id: str,
    url: str,
    *,
    known: int,
    joined: bool,
    replica: str,
    state: str,
    version: int | None,
    error: str | None,
) -> tuple[bool, Member | None]:
    """Record the state of an engine as `replica` saw it, unless the row has changed since it looked.

    `known` is the row's `changes` that the replica knew when it looked, 0 for none. So an observation replaces only
    what was written before it, whatever the clocks of the replicas say. A newer one wins whatever its version: an
    engine that restarted, or was rolled back, serves an older one.

    Returns whether it was recorded, and the row as it is then; None for an engine that joined and has left.
    """
    values: Json = {
        "state": state,
        "version": version,
        "error": error and codec.error_text(error),
        "seen_by": replica,
        "last_seen_at": clock.now(),
    }
    if state != "dead":
        values["starting_until"] = None  # one that answers has started
    mine, unchanged = and_(engines.c.run_id == run_id, engines.c.url == url), engines.c.changes <= known
    if joined:
        row = conn.execute(update(engines).where(mine, unchanged).values(changed(**values)).returning(*_MEMBER)).first()
    else:
        row = conn.execute(
            upsert.insert(conn, engines)
            .values(run_id=run_id, url=url, **engine_claims.new(**values))
            .on_conflict_do_update(index_elements=["run_id", "url"], set_=changed(**values), where=unchanged)
            .returning(*_MEMBER)
        ).first()
    return (True, Member(*row)) if row is not None else (False, member(conn, run_id, url))


def drop_lost(conn: Connection, run_id: str, source: str) -> None:
    """Take engines out of the run that have been dead for CHECKED_S and whose lease is over."""
    lost = and_(
        engines.c.run_id == run_id,
        engines.c.leased_until < clock.now(),
        engines.c.state == "dead",
        engines.c.last_seen_at < clock.now() - CHECKED_S,
    )
    urls = conn.scalars(delete(engines).where(lost).returning(engines.c.url)).all()
    for url in urls:
        events.record(conn, run_id, "engine_left", {"url": url, "why": "its lease ended"}, source)
    if urls:
        engine_claims.some_left(conn, run_id)
