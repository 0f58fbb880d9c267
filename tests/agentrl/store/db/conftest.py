"""Databases whose faults are tested."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from agentrl.store import Database
from agentrl.store.db import database, sql_engines


@pytest.fixture
def postgresql(databases) -> Iterator[Database]:
    with databases.lent("postgresql") as url:
        db = Database(url)
        yield db
        db.close()


@pytest.fixture
def sqlite(databases) -> Iterator[Database]:
    with databases.lent("sqlite") as url:
        db = Database(url)
        yield db
        db.close()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Faults are waited for half a second."""
    monkeypatch.setattr(database, "RETRY_S", 0.5)
    monkeypatch.setattr(sql_engines, "BUSY_TIMEOUT_MS", 100)
