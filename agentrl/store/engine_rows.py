"""The rows of a run's engines, as replicas read and change them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, select

from agentrl.domain.schemas import Json
from agentrl.store.db import clock
from agentrl.store.tables import engines


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
    backend: str | None = None  # None: that of the run, of an engine that no replica has seen yet

    @property
    def joined(self) -> bool:
        """Whether the engine joined by itself."""
        return self.leased_until is not None


COLUMNS = (
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
    engines.c.backend,
)


def member(conn: Connection, run_id: str, url: str) -> Member | None:
    """One engine."""
    return members(conn, run_id, [url]).get(url)


def members(conn: Connection, run_id: str, urls: Sequence[str]) -> dict[str, Member]:
    """Engines by URL, those that there are."""
    if not urls:
        return {}
    rows = conn.execute(select(*COLUMNS).where(engines.c.run_id == run_id, engines.c.url.in_(urls)))
    return {row.url: Member(*row) for row in rows}


def changed(**values: object) -> Json:
    """The columns of a change that every replica has to read: `values`, the next `changes`, and the time."""
    return {**values, "changes": engines.c.changes + 1, "changed_at": clock.now()}


def new(**values: object) -> Json:
    """The columns of a new engine that no replica has seen yet."""
    return {"state": "dead", "last_seen_at": 0.0, "changes": 1, "changed_at": clock.now(), **values}
