"""The migrations build exactly what tables.py says, and go down again."""

from pathlib import Path

from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import inspect

from agentrl.store import Database
from agentrl.store.database import _alembic_config
from agentrl.tables import metadata


def test_autogenerate_finds_no_difference(db: Database):
    with db.read() as conn:
        assert compare_metadata(MigrationContext.configure(conn), metadata) == []


def test_every_revision_goes_down(tmp_path: Path):
    db = Database(f"sqlite:///{tmp_path}/down.db")
    db.upgrade()
    with db.write() as conn:
        command.downgrade(_alembic_config(conn), "base")
        assert inspect(conn).get_table_names() == ["alembic_version"]
    db.upgrade()
    db.require_current()
