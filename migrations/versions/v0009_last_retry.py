"""The number of the last retry that got a call's answer."""

from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("ALTER TABLE interactions ADD COLUMN last_retry INTEGER")


def downgrade() -> None:
    op.execute("ALTER TABLE interactions DROP COLUMN last_retry")
