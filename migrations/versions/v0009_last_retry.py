"""Which retry of its client's got a call's answer last."""

from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("ALTER TABLE interactions ADD COLUMN last_retry INTEGER")


def downgrade() -> None:
    op.execute("ALTER TABLE interactions DROP COLUMN last_retry")
