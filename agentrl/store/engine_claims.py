"""Engines of a run: which replica may change an engine's weights, and which engines are drained.

unclaimed ──► claimed        `claim`: until a deadline, by the database's clock
    ▲            ├──► unclaimed      `release` with whole weights
    └── claim ── expired     `release` without whole weights, `expire_claims`, or the deadline has passed
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, Row, and_, delete, or_, select, update
from sqlalchemy.sql.dml import ReturningInsert, ReturningUpdate

from agentrl.domain.schemas import Json
from agentrl.errors import RequestError
from agentrl.store import events
from agentrl.store.db import clock, upsert
from agentrl.store.db.bulk_unit import bulk_unit, only
from agentrl.store.engine_rows import COLUMNS, Member, changed, members, new
from agentrl.store.tables import engines, runs


def forget(conn: Connection, run_id: str, keep: list[str]) -> None:
    """Delete the engines of an earlier start of the run; those to `keep` are dead until a replica checks them."""
    mine = engines.c.run_id == run_id
    conn.execute(delete(engines).where(mine, engines.c.url.not_in(keep)))
    conn.execute(update(engines).where(mine).values(changed(state="dead")))
    some_left(conn, run_id)


def some_left(conn: Connection, run_id: str) -> None:
    """Make every replica read all engines again: rows of engines were deleted."""
    conn.execute(update(runs).where(runs.c.id == run_id).values(engines_gone=runs.c.engines_gone + 1))


def claim_many(
    conn: Connection, claims: Sequence[tuple[str, str, bool, str, float]]
) -> list[tuple[bool, Member | None]]:
    """`claim` for many engines: one statement for those of one kind and replica, unless some cannot be claimed."""
    results: dict[int, tuple[bool, Member | None]] = {}
    alike: dict[tuple[str, bool, str, float], list[int]] = {}
    for i, (run_id, _, joined, replica, seconds) in enumerate(claims):
        alike.setdefault((run_id, joined, replica, seconds), []).append(i)
    for (run_id, joined, replica, seconds), indices in alike.items():
        mine = {"updater": replica, "updating_until": clock.now() + seconds}
        urls = sorted({claims[i][1] for i in indices})  # in one order, so that replicas do not block each other
        free = or_(engines.c.updater.is_(None), engines.c.updater == replica, engines.c.updating_until < clock.now())
        unit: ReturningUpdate[Any] | ReturningInsert[Any]
        if joined:
            known = update(engines).where(engines.c.run_id == run_id, engines.c.url.in_(urls), free)
            unit = known.values(changed(**mine)).returning(*COLUMNS)
        else:
            rows = [{"run_id": run_id, "url": url, **new(**mine)} for url in urls]
            unit = (
                upsert.insert(conn, engines)
                .values(rows)
                .on_conflict_do_update(index_elements=["run_id", "url"], set_=changed(**mine), where=free)
                .returning(*COLUMNS)
            )
        results |= _found(conn, run_id, {i: claims[i][1] for i in indices}, conn.execute(unit))
    return [results[i] for i in range(len(claims))]


@bulk_unit(many=claim_many)
def claim(
    conn: Connection, run_id: str, url: str, joined: bool, replica: str, seconds: float
) -> tuple[bool, Member | None]:
    """Let only `replica` change an engine's weights, for `seconds`; claiming again extends the time.

    A claim ends by `release`, or after its time. An engine of the run's start gets a row if it has none yet; one that
    `joined` and has no row has left, and is not claimed.

    Returns whether it was claimed, and the engine, whose `updater` has the claim; None for one that has left.
    """
    return only(claim_many(conn, [(run_id, url, joined, replica, seconds)]))


def expire_claims(conn: Connection, run_id: str, replica: str) -> None:
    """Expire the claims of a restarted replica: others may claim the engines and repair their weights."""
    mine = and_(engines.c.run_id == run_id, engines.c.updater == replica)
    conn.execute(update(engines).where(mine).values(changed(updating_until=0.0)))


def release_many(conn: Connection, claims: Sequence[tuple[str, str, str, bool]]) -> list[tuple[bool, Member | None]]:
    """`release` for many engines: one statement for those of one replica, unless some are not its own any more."""
    results: dict[int, tuple[bool, Member | None]] = {}
    alike: dict[tuple[str, str, bool], list[int]] = {}
    for i, (run_id, _, replica, whole) in enumerate(claims):
        alike.setdefault((run_id, replica, whole), []).append(i)
    for (run_id, replica, whole), indices in alike.items():
        urls = sorted({claims[i][1] for i in indices})
        mine = and_(engines.c.run_id == run_id, engines.c.url.in_(urls), engines.c.updater == replica)
        left: Json = {"updater": None, "updating_until": None} if whole else {"updating_until": 0.0}
        released = conn.execute(update(engines).where(mine).values(changed(**left)).returning(*COLUMNS))
        results |= _found(conn, run_id, {i: claims[i][1] for i in indices}, released)
    return [results[i] for i in range(len(claims))]


@bulk_unit(many=release_many)
def release(conn: Connection, run_id: str, url: str, replica: str, whole: bool) -> tuple[bool, Member | None]:
    """End a claim. If the weights are not `whole`, another replica must repair them. Another replica's claim stays.

    Returns whether it was released, and the engine; None for one that has left.
    """
    return only(release_many(conn, [(run_id, url, replica, whole)]))


def _found(
    conn: Connection, run_id: str, urls: Mapping[int, str], written: Iterable[Row[Any]]
) -> dict[int, tuple[bool, Member | None]]:
    """For each number: whether its engine's row was written, and the row as it is now."""
    rows = {row.url: Member(*row) for row in written}
    others = members(conn, run_id, [url for url in urls.values() if url not in rows])
    return {i: (url in rows, rows.get(url) or others.get(url)) for i, url in urls.items()}


def is_whole(conn: Connection, run_id: str, url: str) -> bool:
    """Whether the engine's weights are complete: no replica is changing them or has left them incomplete."""
    row = select(engines.c.updater).where(engines.c.run_id == run_id, engines.c.url == url)
    return conn.scalars(row).one_or_none() is None


def of_run(conn: Connection, run_id: str) -> list[Json]:
    """The engines of the run with their state and version."""
    return [dict(row._mapping) for row in conn.execute(select(engines).where(engines.c.run_id == run_id))]


def set_draining(conn: Connection, run_id: str, url: str, draining: bool, replica: str) -> None:
    """Start or stop draining an engine. Raises RequestError 404 for an unknown engine."""
    row = conn.execute(
        update(engines).where(engines.c.run_id == run_id, engines.c.url == url).values(changed(draining=draining))
    )
    if not row.rowcount:
        raise RequestError(404, f"no engine {url!r}", code="engine_not_found", param="url")
    kind = "engine_drained" if draining else "engine_resumed"
    events.record(conn, run_id, kind, {"url": url}, replica)


def states(conn: Connection, run_id: str) -> dict[str, str]:
    """The state of each engine of a run, by URL."""
    return {row.url: row.state for row in conn.execute(select(engines).where(engines.c.run_id == run_id))}
