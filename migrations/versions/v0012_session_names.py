"""The name by which a client opened a session."""

from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("ALTER TABLE sessions ADD COLUMN name VARCHAR(200)")
    op.execute("CREATE UNIQUE INDEX uq_sessions_name ON sessions (run_id, name) WHERE name IS NOT NULL")


def downgrade() -> None:
    op.execute("DROP INDEX uq_sessions_name")
    op.execute("ALTER TABLE sessions DROP COLUMN name")
