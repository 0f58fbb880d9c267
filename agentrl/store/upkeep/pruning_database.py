"""The database as retention uses it: removing a row scans no other table for references."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import Connection, event, func, select, text

from agentrl.errors import UserError
from agentrl.store.db.database import Database

_PRUNE_LOCK = 0x61677072  # PostgreSQL advisory lock
_REFERENCES = {
    "tmp_prune_parent": "interactions (parent_id) WHERE parent_id IS NOT NULL",
    "tmp_prune_tools": "interactions (tools_hash) WHERE tools_hash IS NOT NULL",
    "tmp_prune_system": "interactions (system_hash) WHERE system_hash IS NOT NULL",
    "tmp_prune_reward": "rewards (interaction_id) WHERE interaction_id IS NOT NULL",
    "tmp_prune_leaf": "trajectories (leaf_id)",
}
"""Foreign keys without an index: recording needs none, but each removed row would scan the table."""


@contextmanager
def without_scans(database: Database) -> Iterator[Database]:
    """The database for pruning, where checking foreign keys of removed rows scans no table.

    SQLite: separate connections that do not check foreign keys; groups are removed as a whole, so no reference to a
    removed row remains. PostgreSQL: temporary indexes, built and dropped without blocking writers. Raises UserError
    while another prune runs.
    """
    if database.is_sqlite:
        own = Database(database.url)
        event.listen(own.engine, "connect", lambda raw, _record: raw.execute("PRAGMA foreign_keys=OFF"))
        try:
            yield own
        finally:
            own.close()
        return
    with database.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as conn:
        if not conn.execute(select(func.pg_try_advisory_lock(_PRUNE_LOCK))).scalar_one():
            raise UserError("another `agentrl store prune` is at work on this database: wait for it")
        try:
            _drop_indexes(conn)  # a prune that was killed left them
            for name, columns in _REFERENCES.items():
                conn.execute(text(f"CREATE INDEX CONCURRENTLY {name} ON {columns}"))
            yield database
        finally:
            _drop_indexes(conn)
            conn.execute(select(func.pg_advisory_unlock(_PRUNE_LOCK)))


def _drop_indexes(conn: Connection) -> None:
    for name in _REFERENCES:
        conn.execute(text(f"DROP INDEX CONCURRENTLY IF EXISTS {name}"))
