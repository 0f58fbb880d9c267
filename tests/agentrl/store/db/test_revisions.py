"""The revision of a schema."""

import subprocess
import sys

import pytest
from alembic.script import ScriptDirectory

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


def test_the_newest_revision_is_the_head_of_the_migrations():
    assert ScriptDirectory.from_config(revisions.alembic_config()).get_heads() == [revisions.newest_revision()]


def test_a_current_database_is_opened_and_upgraded_without_alembic(db):
    opened = f"""
import sys
from agentrl.store import Database
database = Database({db.url!r})
database.require_current()
database.upgrade()
print("alembic" in sys.modules)
"""
    assert subprocess.check_output([sys.executable, "-c", opened], text=True).strip() == "False"
