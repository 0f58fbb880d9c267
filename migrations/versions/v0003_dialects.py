"""Columns for calls of every dialect: system messages apart from the others, options, number of messages.

Columns are added by plain ALTER TABLE: on SQLite rebuilding a table that others refer to would break its foreign keys.
"""

from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

COLUMNS = [
    "system_hash VARCHAR(64) CONSTRAINT fk_interactions_system_hash REFERENCES contents (hash)",
    "options JSON",
    "messages INTEGER NOT NULL DEFAULT 0",
]


def upgrade() -> None:
    for column in COLUMNS:
        op.execute(f"ALTER TABLE interactions ADD COLUMN {column}")


def downgrade() -> None:
    for column in COLUMNS:
        op.execute(f"ALTER TABLE interactions DROP COLUMN {column.split()[0]}")
