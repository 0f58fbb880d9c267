"""What replicas read of the fleet each second: which engines changed, whether some left, what each process does."""

from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None

COLUMNS = [
    ("engines", "changes INTEGER NOT NULL DEFAULT 0"),
    ("engines", "changed_at FLOAT NOT NULL DEFAULT 0"),
    ("engines", "seen_by VARCHAR(100)"),
    ("engines", "own_key BOOLEAN NOT NULL DEFAULT false"),
    ("runs", "engines_gone INTEGER NOT NULL DEFAULT 0"),
    ("heartbeats", "about JSON"),
]


def upgrade() -> None:
    for table, column in COLUMNS:
        op.execute(f"ALTER TABLE {table} ADD COLUMN {column}")
    op.execute("CREATE INDEX ix_engines_changed ON engines (run_id, changed_at)")


def downgrade() -> None:
    op.execute("DROP INDEX ix_engines_changed")
    for table, column in reversed(COLUMNS):
        op.execute(f"ALTER TABLE {table} DROP COLUMN {column.split()[0]}")
