"""Trees of sub-agents' sessions, and sweeps over them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from hypothesis import strategies as st
from play import open_group
from sqlalchemy import event, insert, select

from agentrl.store import Database
from agentrl.store.db import codec
from agentrl.store.sessions import child_sessions
from agentrl.store.sessions.ends import liveness, settling
from agentrl.store.sessions.session_limits import Limits
from agentrl.store.tables import sessions as sessions_table

trees = st.integers(1, 24).flatmap(lambda n: st.tuples(*(st.integers(0, max(0, i - 1)) for i in range(n))))
"""For each session but the root, the number of its parent."""


def child(db: Database, parent_id: str, limits: Limits) -> str:
    with db.write() as conn:
        return child_sessions.start_child(conn, parent_id, limits, codec.new_id(), {}).session_ids[0]


def grown(db: Database, run_id: str, limits: Limits, parents: tuple[int, ...]) -> list[str]:
    """A group whose only session has sub-agents, by the number of each one's parent."""
    ids = list(open_group(db, run_id, limits, 1).session_ids)
    for parent in parents[1:]:
        ids.append(child(db, ids[parent], limits))
    return ids


def old_tree(db: Database, run_id: str, limits: Limits, parents: list[int]) -> list[str]:
    """The same, of any size, as rows that are there."""
    ids = list(open_group(db, run_id, limits, 1).session_ids)
    depths = [0]
    with db.write() as conn:
        root = conn.execute(select(sessions_table).where(sessions_table.c.id == ids[0])).one()._mapping
        for parent in parents:
            ids.append(codec.new_id(after=ids[-1]))
            depths.append(depths[parent] + 1)
        rows = [
            {
                **root,
                "id": ids[i],
                "parent_session_id": ids[parent],
                "root_session_id": ids[0],
                "depth": depths[i],
                "sample_index": i,
                "key_hash": ids[i],
            }
            for i, parent in enumerate(parents, start=1)
        ]
        conn.execute(insert(sessions_table), rows)
    return ids


@contextmanager
def counted(db: Database) -> Iterator[SimpleNamespace]:
    """Records the statements that the block executes, and the sessions that are built."""
    seen = SimpleNamespace(statements=0, built=0)

    def note(conn: Any, cursor: Any, statement: str, parameters: Any, context: Any, executemany: bool) -> None:
        seen.statements += 1
        seen.built += statement.startswith("UPDATE sessions SET built")

    event.listen(db.engine, "before_cursor_execute", note)
    yield seen
    event.remove(db.engine, "before_cursor_execute", note)


def sweep_to_the_end(db: Database, run_id: str, limits: Limits, seen: SimpleNamespace | None = None) -> None:
    """Look at what is due, each session in a transaction of its own; no transaction does more than its share."""
    while due := db.query(liveness.due, run_id):
        for session_id in due:
            if seen is not None:
                seen.statements = seen.built = 0
            db.transact(liveness.check_due_session, session_id, limits, heard_since=0.0)
            if seen is not None:
                assert seen.built <= settling.MOST_SETTLED
                assert seen.statements <= 20 * settling.MOST_SETTLED
