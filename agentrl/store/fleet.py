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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from sqlalchemy import Connection, and_, delete, func, or_, select, update

from agentrl.domain.schemas import Json
from agentrl.errors import RequestError
from agentrl.store import engine_claims, engine_rows, events
from agentrl.store.db import clock, codec, upsert
from agentrl.store.db.bulk_unit import bulk_unit, only
from agentrl.store.engine_rows import Member, changed
from agentrl.store.tables import engines, heartbeats, memory_leases, runs

MAX_ENGINES = 10_000
"""Engines of one run."""
OVERLAP_S = 5.0
"""A read repeats the changes of this time before the last one: their transactions may have been committed since."""
CHECKED_S = 5.0
"""An engine is dropped only if it was dead for this time: its watchers have tried to reach it since."""


@dataclass(frozen=True, slots=True)
class News:
    """The changes that a replica reads each second."""

    at: float  # when it was read, by the database's clock
    version: int  # the run's
    leased: bool  # a trainer has the engines' GPU memory, or hands it back: `memory_leases`
    gone: int  # engines that have left so far
    whole: bool  # `members` are all engines, not only those that changed
    members: list[Member]
    replicas: Mapping[str, tuple[float, Json]]  # proxies: name → when each was last seen, and what it does
    epoch: int = 0  # of the newest trainer


def news(conn: Connection, run_id: str, since: News | None, heard_s: float) -> News:
    """The engines that changed after an earlier read; all of them without one, or if engines have left.

    `replicas` are those that were seen in the last `heard_s` seconds.
    """
    asked = (
        select(
            runs.c.current_version,
            runs.c.engines_gone,
            runs.c.trainer_epoch,
            memory_leases.c.run_id.is_not(None),
            clock.now(),
        )
        .join_from(runs, memory_leases, memory_leases.c.run_id == runs.c.id, isouter=True)
        .where(runs.c.id == run_id)
    )
    version, gone, epoch, leased, at = conn.execute(asked).one()
    whole = since is None or since.gone != gone
    rows = select(*engine_rows.COLUMNS).where(engines.c.run_id == run_id)
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
        epoch=epoch,
    )


def join(
    conn: Connection,
    run_id: str,
    url: str,
    lease_s: float,
    source: str,
    own_key: bool = False,
    backend: str | None = None,
) -> float:
    """Let an engine join, or renew its lease; returns the lease's end (seconds since the epoch).

    `backend` is the kind of its server; None: that of the run.

    Raises RequestError 409 when the run has MAX_ENGINES engines.
    """
    mine = and_(engines.c.run_id == run_id, engines.c.url == url)
    before = conn.execute(
        select(engines.c.own_key, engines.c.backend).where(mine, engines.c.leased_until.is_not(None))
    ).first()
    known = conn.execute(select(func.count()).where(engines.c.run_id == run_id)).scalar_one()
    if before is None and known >= MAX_ENGINES:
        raise RequestError(409, f"the run has {MAX_ENGINES} engines already", code="too_many_engines", param="url")
    values = {"leased_until": clock.now() + lease_s, "own_key": own_key, "backend": backend}
    told = values if before == (own_key, backend) else changed(**values)  # a renewal is no news
    if before is not None and before.backend not in (None, backend):
        told |= {"state": "dead", "version": None}  # what was seen at this address was another server
    until = conn.scalars(
        upsert.insert(conn, engines)
        .values(run_id=run_id, url=url, **engine_rows.new(**values))
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


class _Saw(NamedTuple):
    """The state of an engine as a replica saw it."""

    replica: str
    state: str
    version: int | None
    error: str | None
    backend: str | None = None

    def columns(self) -> Json:
        values: Json = {
            "state": self.state,
            "version": self.version,
            "error": self.error and codec.error_text(self.error),
            "seen_by": self.replica,
            "last_seen_at": clock.now(),
        }
        if self.backend is not None:
            values["backend"] = self.backend
        if self.state != "dead":
            values["starting_until"] = None  # one that answers has started
        return values


def save_many(conn: Connection, seen: Sequence[tuple[Any, ...]]) -> list[tuple[bool, Member | None]]:
    """`save` for many engines: one statement for those in one state, unless the rows of some have changed."""
    results: list[tuple[bool, Member | None]] = [(False, None)] * len(seen)
    alike: dict[tuple[str, _Saw], list[int]] = {}
    for i, (run_id, url, known, joined, *state) in enumerate(seen):
        saw = _Saw(*state)
        if known == 0 and not joined:
            results[i] = _save_listed(conn, run_id, url, known, saw)
        else:
            alike.setdefault((run_id, saw), []).append(i)
    for (run_id, saw), indices in alike.items():
        unchanged = or_(*(and_(engines.c.url == seen[i][1], engines.c.changes <= seen[i][2]) for i in indices))
        recorded = update(engines).where(engines.c.run_id == run_id, unchanged).values(changed(**saw.columns()))
        rows = {row.url: Member(*row) for row in conn.execute(recorded.returning(*engine_rows.COLUMNS))}
        others = engine_rows.members(conn, run_id, [seen[i][1] for i in indices if seen[i][1] not in rows])
        for i in indices:
            _, url, known, joined, *_ = seen[i]
            if url in rows:
                results[i] = True, rows[url]
            elif url in others or joined:
                results[i] = False, others.get(url)
            else:
                results[i] = _save_listed(conn, run_id, url, known, saw)
    return results


@bulk_unit(many=save_many)
def save(
    conn: Connection,
    run_id: str,
    url: str,
    known: int,
    joined: bool,
    replica: str,
    state: str,
    version: int | None,
    error: str | None,
    backend: str | None = None,
) -> tuple[bool, Member | None]:
    """Record the state of an engine as `replica` saw it, unless the row has changed since it looked.

    `known` is the row's `changes` that the replica knew when it looked, 0 for none. So an observation replaces only
    what was written before it, whatever the clocks of the replicas say. A newer one wins whatever its version: an
    engine that restarted, or was rolled back, serves an older one.

    Returns whether it was recorded, and the row as it is then; None for an engine that joined and has left.
    """
    return only(save_many(conn, [(run_id, url, known, joined, replica, state, version, error, backend)]))


def _save_listed(conn: Connection, run_id: str, url: str, known: int, saw: _Saw) -> tuple[bool, Member | None]:
    """`save` for an engine of the run's start, which may have no row yet."""
    values = saw.columns()
    row = conn.execute(
        upsert.insert(conn, engines)
        .values(run_id=run_id, url=url, **engine_rows.new(**values))
        .on_conflict_do_update(
            index_elements=["run_id", "url"], set_=changed(**values), where=engines.c.changes <= known
        )
        .returning(*engine_rows.COLUMNS)
    ).first()
    return (True, Member(*row)) if row is not None else (False, engine_rows.member(conn, run_id, url))


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
