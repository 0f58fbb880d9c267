"""The replica that may change an engine's weights, and until when."""

from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

COLUMNS = ["updater VARCHAR(100)", "updating_until FLOAT"]


def upgrade() -> None:
    for column in COLUMNS:
        op.execute(f"ALTER TABLE engines ADD COLUMN {column}")


def downgrade() -> None:
    for column in reversed(COLUMNS):
        op.execute(f"ALTER TABLE engines DROP COLUMN {column.split()[0]}")
