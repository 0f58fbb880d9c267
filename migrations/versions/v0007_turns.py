"""When workers and outside programs were last refused a place in a run, and which of them got the last place."""

from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

COLUMNS = ["worker_asked_at FLOAT", "outside_asked_at FLOAT", "outside_had_last BOOLEAN NOT NULL DEFAULT FALSE"]


def upgrade() -> None:
    for column in COLUMNS:
        op.execute(f"ALTER TABLE runs ADD COLUMN {column}")


def downgrade() -> None:
    for column in reversed(COLUMNS):
        op.execute(f"ALTER TABLE runs DROP COLUMN {column.split()[0]}")
