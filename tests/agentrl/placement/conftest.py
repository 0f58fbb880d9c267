"""A run in either database."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from run_records import create_run

from agentrl.store import Database


@pytest.fixture
def db(database_url: str) -> Iterator[Database]:
    database = Database(database_url)
    yield database
    database.close()


@pytest.fixture
def run_id(db: Database) -> str:
    with db.write() as conn:
        return create_run(conn, task_data=[{}], steps=10)
