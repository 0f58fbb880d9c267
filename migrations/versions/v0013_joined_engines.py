"""The lease of an engine that joined a run while it went on."""

from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("ALTER TABLE engines ADD COLUMN leased_until FLOAT")


def downgrade() -> None:
    op.execute("ALTER TABLE engines DROP COLUMN leased_until")
