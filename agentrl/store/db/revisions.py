"""The schema's revisions: the newest of this installation, that of a database, and the way between them.

Alembic, whose import takes as long as SQLAlchemy's, is imported only to migrate.
"""

from __future__ import annotations

import re
from functools import lru_cache
from importlib.resources import files
from typing import TYPE_CHECKING

from sqlalchemy import Connection, inspect, text

if TYPE_CHECKING:
    from alembic.config import Config

MIGRATION_LOCK = 0x61676E74  # PostgreSQL advisory lock
_SCRIPT = re.compile(r"v(\d{4})_\w+\.py")


@lru_cache(maxsize=1)
def newest_revision() -> str:
    """The revision that this installation's migrations lead to, by the names of their files, read once per process."""
    names = (_SCRIPT.fullmatch(file.name) for file in (files("agentrl.migrations") / "versions").iterdir())
    return max(name[1] for name in names if name is not None)


def revision_of(conn: Connection) -> str | None:
    """The revision of a database; None for one without tables."""
    if not inspect(conn).has_table("alembic_version"):
        return None
    return conn.execute(text("SELECT version_num FROM alembic_version")).scalar()


def migrate(conn: Connection, revision: str, *, up: bool) -> None:
    """Upgrade or downgrade to a revision, in the transaction of `conn`; one migration at a time on PostgreSQL."""
    from alembic import command

    if conn.dialect.name != "sqlite":
        conn.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": MIGRATION_LOCK})
    config = alembic_config()
    config.attributes["connection"] = conn
    (command.upgrade if up else command.downgrade)(config, revision)


def alembic_config() -> Config:
    """Alembic's configuration for the packaged scripts."""
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(files("agentrl.migrations")))
    return config
