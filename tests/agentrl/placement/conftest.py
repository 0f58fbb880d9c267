"""A run in either database."""

from __future__ import annotations

import pytest
from run_records import create_run

from agentrl.store import Database


@pytest.fixture
def run_id(db: Database) -> str:
    with db.write() as conn:
        return create_run(conn, task_data=[{}], steps=10)
