"""The revision of a schema."""

import pytest

from agentrl.errors import StoreError
from agentrl.store import Database
from agentrl.store.db import revisions


def test_an_old_schema_names_the_command(empty_database_url):
    db = Database(empty_database_url)
    with pytest.raises(StoreError, match="agentrl db upgrade"):
        db.require_current()
    db.upgrade()
    db.require_current()
    db.downgrade("-1")
    with pytest.raises(StoreError, match="agentrl db upgrade"):
        db.require_current()
    db.close()


def test_the_migrations_are_read_once_per_process(db):
    revisions.newest_revision.cache_clear()
    for _ in range(3):
        db.require_current()
    assert revisions.newest_revision.cache_info().misses == 1
