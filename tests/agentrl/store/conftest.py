"""The store on both databases, and the smallest run."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from run_records import create_run
from sqlalchemy import event

sys.path.insert(0, str(Path(__file__).parent))  # for `import play`

from agentrl.store import Database
from agentrl.store.sessions import session_limits


@pytest.fixture
def fast_db(database_url: str) -> Iterator[Database]:
    """Commits that do not wait for the disk."""
    database = Database(database_url)

    @event.listens_for(database.engine, "connect")
    def _on_connect(raw, _record):
        cursor = raw.cursor()
        cursor.execute("PRAGMA synchronous=OFF" if database.is_sqlite else "SET synchronous_commit = off")
        cursor.close()
        raw.commit()

    yield database
    database.close()


@pytest.fixture
def empty(empty_database_url: str) -> Iterator[Database]:
    """A store without tables, opened."""
    database = Database(empty_database_url)
    yield database
    database.close()


@pytest.fixture
def limits() -> session_limits.Limits:
    return session_limits.Limits(
        group_size=2,
        min_group_size=2,
        max_concurrent_groups=100,
        max_staleness=1,
        groups_per_step=2,
        turn_discount=1.0,
        reward_timeout_s=0.0,
        end_grace_s=30.0,
        session_timeout_s=900.0,
        session_max_s=86400.0,
        heartbeat_timeout_s=60.0,
    )


@pytest.fixture
def run_id(db: Database) -> str:
    with db.write() as conn:
        return create_run(conn, task_data=[{"n": i} for i in range(5)], steps=10)
