"""The schema's revisions, as this installation's Alembic scripts define them."""

from __future__ import annotations

from functools import lru_cache
from importlib.resources import files

from alembic.config import Config as AlembicConfig
from alembic.script import ScriptDirectory
from sqlalchemy import Connection

MIGRATION_LOCK = 0x61676E74  # PostgreSQL advisory lock


@lru_cache(maxsize=1)
def newest_revision() -> str | None:
    """The revision that this installation's migrations lead to; the scripts are read once per process."""
    return ScriptDirectory.from_config(alembic_config()).get_current_head()


def alembic_config(connection: Connection | None = None) -> AlembicConfig:
    """Alembic's configuration for the packaged scripts, run over `connection`."""
    config = AlembicConfig()
    config.set_main_option("script_location", str(files("agentrl.migrations")))
    config.attributes["connection"] = connection
    return config
