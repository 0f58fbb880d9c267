"""Measures and removes rows for retention, one transaction at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import ColumnElement, Connection, Select, delete, func, select, text, tuple_, update

from agentrl.store.tables import (
    contents,
    events,
    groups,
    heartbeats,
    interaction_data,
    interactions,
    routed_experts,
    runs,
    sessions,
    token_facts,
)
from agentrl.store.upkeep.prunable_rows import (
    old_events,
    old_facts,
    old_heartbeats,
    orphaned,
    prunable,
    rows_of_groups,
)

PAGE_EVENTS = 5000
PAGE_CONTENTS = 5000
PAGE_FACTS = 500
TABLES = (
    "groups",
    "sessions",
    "interactions",
    "interaction_data",
    "routed_experts",
    "rewards",
    "trajectories",
    "trajectory_interactions",
    "token_facts",
    "teacher_logprobs",
    "contents",
    "events",
    "heartbeats",
)
"""Tables whose rows can be removed."""


@dataclass(slots=True)
class Pruned:
    """Rows removed, or to be removed, by table, and the bytes of their arrays, messages and bodies."""

    rows: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(TABLES, 0)))
    bytes: int = 0

    def add(self, other: Pruned) -> None:
        """Add the counts of `other`."""
        self.rows.update(other.rows)
        self.bytes += other.bytes


def measure(conn: Connection, group_ids: Sequence[str]) -> Pruned:
    found = Pruned()
    for table, where in rows_of_groups(group_ids).items():
        found.rows[table.name] += conn.execute(select(func.count()).select_from(table).where(where)).scalar_one()
    data = interaction_data.c
    packed = (data.new_messages, data.answer, data.prompt_delta_ids, data.output_ids, data.logprobs)
    sizes = sum((func.length(column) for column in packed[1:]), start=func.length(packed[0]))
    where = rows_of_groups(group_ids)[interaction_data]
    found.bytes += int(conn.execute(select(func.coalesce(func.sum(sizes), 0)).where(where)).scalar_one())
    routing = func.coalesce(func.sum(func.length(routed_experts.c.data)), 0)
    found.bytes += int(conn.execute(select(routing).where(rows_of_groups(group_ids)[routed_experts])).scalar_one())
    return found


def estimate_rest(conn: Connection, run_id: str, cut: float, kept: Set[str]) -> Pruned:
    """The rows removed after the groups: contents that only these groups use, old facts of tokens, events and
    heartbeats.
    """
    going = select(sessions.c.id).where(
        sessions.c.group_id.in_(select(groups.c.id).where(*prunable(run_id, cut, kept)))
    )
    orphans = conn.execute(
        select(func.count(), func.coalesce(func.sum(func.length(contents.c.body)), 0)).where(
            *orphaned(interactions.c.session_id.not_in(going))
        )
    ).one()
    found = Pruned(Counter({"contents": orphans[0]}), orphans[1])
    found.add(_measure_facts(conn, old_facts(run_id, cut)))
    for table, where in ((events, old_events(run_id, cut)), (heartbeats, old_heartbeats(run_id, cut))):
        found.rows[table.name] += conn.execute(select(func.count()).select_from(table).where(*where)).scalar_one()
    return found


def remove_groups(conn: Connection, run_id: str, cut: float, kept: Set[str], group_ids: Sequence[str]) -> Pruned:
    """Remove those of the groups that are still prunable, and lower the run's counters. Safe to repeat."""
    # Sessions first, in the order of every lock: a late reward waits here, and then finds no session.
    _lock(conn, select(sessions.c.id).where(sessions.c.group_id.in_(group_ids)).order_by(sessions.c.id))
    going = select(groups.c.id, groups.c.is_eval).where(*prunable(run_id, cut, kept), groups.c.id.in_(group_ids))
    rows = conn.execute(going.order_by(groups.c.id).with_for_update(of=groups)).all()
    ids = [row.id for row in rows]
    removed = measure(conn, ids)
    for table, where in rows_of_groups(ids).items():
        conn.execute(delete(table).where(where))
    counted = sum(not row.is_eval for row in rows)
    if counted:
        conn.execute(
            update(runs)
            .where(runs.c.id == run_id)
            .values(admitted=runs.c.admitted - counted, returned=runs.c.returned - counted)
        )
    return removed


def _lock(conn: Connection, statement: Select[Any]) -> None:
    conn.execute(statement.with_for_update()).all()


def remove_contents(conn: Connection, hashes: Sequence[str]) -> Pruned:
    if conn.dialect.name != "sqlite":  # waits for uncommitted calls, whose contents would look unused
        conn.execute(text("LOCK TABLE contents IN SHARE ROW EXCLUSIVE MODE"))
    going = conn.execute(
        select(contents.c.hash, func.length(contents.c.body).label("size")).where(
            contents.c.hash.in_(hashes), *orphaned()
        )
    ).all()
    conn.execute(delete(contents).where(contents.c.hash.in_([row.hash for row in going])))
    return Pruned(Counter({"contents": len(going)}), sum(row.size for row in going))


def remove_facts(conn: Connection, run_id: str, cut: float) -> Pruned:
    """Remove one page of old facts of tokens."""
    page = conn.execute(
        select(token_facts.c.step_id, token_facts.c.trajectory_id).where(*old_facts(run_id, cut)).limit(PAGE_FACTS)
    ).all()
    if not page:
        return Pruned()
    going = tuple_(token_facts.c.step_id, token_facts.c.trajectory_id).in_([tuple(row) for row in page])
    removed = _measure_facts(conn, [going])
    conn.execute(delete(token_facts).where(going))
    return removed


def _measure_facts(conn: Connection, where: Sequence[ColumnElement[bool]]) -> Pruned:
    size = func.coalesce(func.sum(func.length(token_facts.c.data)), 0)
    rows, found = conn.execute(select(func.count(), size).select_from(token_facts).where(*where)).one()
    return Pruned(Counter({"token_facts": rows}), int(found))


def remove_events(conn: Connection, run_id: str, cut: float) -> int:
    page = select(events.c.id).where(*old_events(run_id, cut)).limit(PAGE_EVENTS)
    return conn.execute(delete(events).where(events.c.id.in_(page))).rowcount


def remove_heartbeats(conn: Connection, run_id: str, cut: float) -> int:
    return conn.execute(delete(heartbeats).where(*old_heartbeats(run_id, cut))).rowcount
