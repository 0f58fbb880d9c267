"""Why the filter of a rollout worker rejected a group."""

import sqlalchemy as sa
from alembic import op

revision = "0019"
down_revision = "0018"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("groups", sa.Column("reject_reason", sa.String(length=100), nullable=True))


def downgrade() -> None:
    op.drop_column("groups", "reject_reason")
