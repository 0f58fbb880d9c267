"""Sessions by what they said and how they ended, newest first: a scan that a number of rows and a time bound.

    window of sessions ─► columns of the session ─► returns ─► fork reasons ─► texts and tools of the calls ─► rows

Each filter reads only what the one before it has left. A window grows while windows are fast. When the time is up, the
answer holds what was found, and `before`, from where another search goes on.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, Select, func, select

from agentrl.domain.schemas import Json, SessionStatus
from agentrl.store.tables import interactions, sessions, trajectories
from agentrl.store.training import returns
from agentrl.store.views import run_extent
from agentrl.store.views.said_text import Phrase, calls_with

PAGE = 25
BUDGET_S = 0.2
FIRST_WINDOW, WIDEST_WINDOW = 50, 4000
FAST_S = 0.02
"""A window that took less is followed by a wider one."""
STATUSES = {
    "completed": (SessionStatus.COMPLETED,),
    "failed": (SessionStatus.FAILED,),
    "abandoned": (SessionStatus.ABANDONED,),
    "open": (SessionStatus.OPEN, SessionStatus.CLOSING),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """The conditions on a session; None: no condition."""

    text: str | None = None
    tool: str | None = None
    fork: str | None = None
    status: str | None = None
    error: str | None = None
    low: float | None = None
    high: float | None = None
    is_eval: bool | None = None

    @property
    def reads_calls(self) -> bool:
        """Whether the texts of calls decide."""
        return self.text is not None or self.tool is not None


@dataclass(slots=True)
class Found:
    """The rows, how many sessions were looked at and back to which time, and from where to go on (None: the end)."""

    rows: list[Json] = field(default_factory=list)
    looked_at: int = 0
    back_to: float | None = None
    before: str | None = None


def of_run(
    conn: Connection, run_id: str, wanted: Wanted, before: str | None = None, budget_s: float = BUDGET_S
) -> Found:
    """The newest sessions that are as wanted: those older than session `before`, if given."""
    deadline = time.monotonic() + budget_s
    found, size = Found(), FIRST_WINDOW
    oldest, cursor = run_extent.of_run(conn, run_id)
    cursor = min(cursor, before) if before is not None else cursor
    while True:
        began = time.monotonic()
        rows = conn.execute(
            select(sessions.c.id, sessions.c.run_id)
            .where(sessions.c.id < cursor, sessions.c.id > oldest)
            .order_by(sessions.c.id.desc())
            .limit(size)
        )
        window = {row.id: row.run_id == run_id for row in rows}
        if not window:
            found.before = None
            break
        cursor = _take(conn, run_id, wanted, window, found, deadline)
        found.before = cursor
        if len(found.rows) >= PAGE or time.monotonic() > deadline:
            break
        size = min(size * 2, WIDEST_WINDOW) if time.monotonic() - began < FAST_S else max(size // 2, 1)
    if found.before is not None and cursor:
        found.back_to = _time_of(cursor)
    _describe(conn, found.rows)
    return found


def _take(conn: Connection, run_id: str, wanted: Wanted, window: dict[str, bool], found: Found, deadline: float) -> str:
    """Add the sessions of a window that are as wanted; returns the id of the last session that was looked at.

    The window has the sessions of every run, newest first, and whether each is of this one.
    """
    newest, last = next(iter(window)), next(reversed(window))
    room = PAGE - len(found.rows)
    narrow = wanted.reads_calls or wanted.fork is not None or wanted.low is not None or wanted.high is not None
    query = _matching(run_id, wanted).where(sessions.c.id <= newest, sessions.c.id >= last)
    left = list(conn.execute(query if narrow else query.limit(room)))
    if narrow:
        left = _by_return(conn, left, wanted)
    if wanted.fork is not None:
        left = _by_fork(conn, left, wanted.fork)
    hits: dict[str, Json] = {}
    if wanted.reads_calls:
        phrase = None if wanted.text is None else Phrase(wanted.text)
        ids = [row.id for row in left]
        hits, stopped_at = calls_with(conn, ids, phrase, wanted.tool, most=room, deadline=deadline)
        left = [row for row in left if row.id in hits]
        last = stopped_at or last
    elif len(left) >= room:
        left = left[:room]
        last = left[-1].id
    found.rows += [dict(row._mapping) | {"hit": hits.get(row.id)} for row in left]
    found.looked_at += sum(of_run for session_id, of_run in window.items() if session_id >= last)
    return last


def _matching(run_id: str, wanted: Wanted) -> Select[Any]:
    s = sessions.c
    conditions: list[ColumnElement[bool]] = [s.run_id == run_id]
    if wanted.status is not None:
        conditions.append(s.status.in_(STATUSES[wanted.status]))
    if wanted.is_eval is not None:
        conditions.append(s.is_eval.is_(wanted.is_eval))
    if wanted.error is not None:
        conditions.append(s.error.icontains(wanted.error, autoescape=True))
    columns = (s.id, s.group_id, s.status, s.is_eval, s.error, s.created_at, s.ended_at)
    return select(*columns).where(*conditions).order_by(s.id.desc())


def _by_return(conn: Connection, rows: list[Row[Any]], wanted: Wanted) -> list[Row[Any]]:
    if wanted.low is None and wanted.high is None:
        return rows
    low = float("-inf") if wanted.low is None else wanted.low
    high = float("inf") if wanted.high is None else wanted.high
    known = returns_of(conn, [row.id for row in rows])
    return [row for row in rows if row.id in known and low <= known[row.id] <= high]


def _by_fork(conn: Connection, rows: list[Row[Any]], reason: str) -> list[Row[Any]]:
    of_rows = interactions.c.session_id.in_([row.id for row in rows])
    having = set(
        conn.execute(select(interactions.c.session_id).where(of_rows, interactions.c.fork_reason == reason)).scalars()
    )
    return [row for row in rows if row.id in having]


def returns_of(conn: Connection, session_ids: Sequence[str]) -> dict[str, float]:
    """The return of each session that has one: of its trajectories, else the sum of its counted rewards."""
    t = trajectories.c
    of_sessions = t.session_id.in_(session_ids)
    rows = conn.execute(select(t.session_id, func.max(t["return"])).where(of_sessions).group_by(t.session_id))
    known = {session_id: float(value) for session_id, value in rows if value is not None}
    rest = [session_id for session_id in session_ids if session_id not in known]
    applied = returns.applied(conn, rest) if rest else {}
    return known | {session_id: applied[session_id].total for session_id in rest if applied[session_id].any}


def _describe(conn: Connection, rows: Sequence[Json]) -> None:
    """Add to each row its return, its number of calls and its fork reasons."""
    ids = [row["id"] for row in rows]
    known = returns_of(conn, ids)
    calls, forks = Counter[str](), dict[str, Counter[str]]()
    c = interactions.c
    counts = select(c.session_id, c.fork_reason, func.count()).where(c.session_id.in_(ids))
    for session_id, reason, n in conn.execute(counts.group_by(c.session_id, c.fork_reason)):
        calls[session_id] += n
        if reason is not None:
            forks.setdefault(session_id, Counter())[reason] += n
    for row in rows:
        of_row = forks.get(row["id"], Counter())
        row |= {"return_": known.get(row["id"]), "calls": calls[row["id"]], "forks": of_row.most_common()}


def _time_of(made: str) -> float | None:
    """When an id was made."""
    try:
        return (int(made[:16], 16) >> 16) / 1000
    except ValueError:
        return None
