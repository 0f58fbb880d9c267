"""The engines of a run as its replicas see them, and which replica may change one's weights."""

from __future__ import annotations

import time

from sqlalchemy import Connection, and_, delete, or_, select, update

from agentrl.domain.schemas import Json
from agentrl.errors import RequestError
from agentrl.store import events
from agentrl.store.db import codec, upsert
from agentrl.store.tables import engines


def save(conn: Connection, run_id: str, url: str, *, state: str, version: int | None, error: str | None) -> None:
    """Record what a replica believes of an engine."""
    values = {
        "state": state,
        "version": version,
        "error": error and codec.error_text(error),
        "last_seen_at": time.time(),
    }
    conn.execute(
        upsert.insert(conn, engines)
        .values(run_id=run_id, url=url, **values)
        .on_conflict_do_update(index_elements=["run_id", "url"], set_=values)
    )


def forget(conn: Connection, run_id: str, keep: list[str]) -> None:
    """A new start of the run has other engines but for those to `keep`, of which it is not known how they are."""
    mine = engines.c.run_id == run_id
    conn.execute(delete(engines).where(mine, engines.c.url.not_in(keep)))
    conn.execute(update(engines).where(mine).values(state="dead"))


def claim(conn: Connection, run_id: str, url: str, replica: str, seconds: float) -> str | None:
    """Let `replica` alone change an engine's weights, for so long; again if it has taken it already.

    Returns None, or who has it: it is free when given back, or when that one's time is over, by the clock of who asks:
    clocks of replicas' hosts must not differ by as much as it is taken for.
    """
    now = time.time()
    mine = {"updater": replica, "updating_until": now + seconds}
    free = or_(engines.c.updater.is_(None), engines.c.updater == replica, engines.c.updating_until < now)
    conn.execute(
        upsert.insert(conn, engines)
        .values(run_id=run_id, url=url, state="dead", last_seen_at=0.0, **mine)
        .on_conflict_do_update(index_elements=["run_id", "url"], set_=mine, where=free)
    )
    holder = conn.scalars(select(engines.c.updater).where(engines.c.run_id == run_id, engines.c.url == url)).one()
    return None if holder == replica else str(holder)


def expire_claims(conn: Connection, run_id: str, replica: str) -> None:
    """A replica that starts changes nothing yet: what it had taken is free, and left as it was."""
    mine = and_(engines.c.run_id == run_id, engines.c.updater == replica)
    conn.execute(update(engines).where(mine).values(updating_until=0.0))


def release(conn: Connection, run_id: str, url: str, replica: str, whole: bool) -> None:
    """Others may change its weights, and have to where they are not `whole`. What another took since stays its."""
    mine = and_(engines.c.run_id == run_id, engines.c.url == url, engines.c.updater == replica)
    left = {"updater": None, "updating_until": None} if whole else {"updating_until": 0.0}
    conn.execute(update(engines).where(mine).values(left))


def is_whole(conn: Connection, run_id: str, url: str) -> bool:
    """Whether nobody changes an engine's weights, nor has begun to and left it."""
    row = select(engines.c.updater).where(engines.c.run_id == run_id, engines.c.url == url)
    return conn.scalars(row).one_or_none() is None


def of_run(conn: Connection, run_id: str) -> list[Json]:
    """The engines of the run with their state and version."""
    return [dict(row._mapping) for row in conn.execute(select(engines).where(engines.c.run_id == run_id))]


def drained(conn: Connection, run_id: str) -> set[str]:
    """The engines that take no calls."""
    return set(conn.scalars(select(engines.c.url).where(engines.c.run_id == run_id, engines.c.draining)))


def set_draining(conn: Connection, run_id: str, url: str, draining: bool, replica: str) -> None:
    """Let an engine take no calls, or take them again. Raises RequestError 404 for one that the run does not have."""
    row = conn.execute(
        update(engines).where(engines.c.run_id == run_id, engines.c.url == url).values(draining=draining)
    )
    if not row.rowcount:
        raise RequestError(404, f"no engine {url!r}", code="engine_not_found", param="url")
    kind = "engine_drained" if draining else "engine_resumed"
    events.record(conn, run_id, kind, {"url": url}, replica)


def states(conn: Connection, run_id: str) -> dict[str, str]:
    """The state of each engine of a run, by URL."""
    return {row.url: row.state for row in conn.execute(select(engines).where(engines.c.run_id == run_id))}
