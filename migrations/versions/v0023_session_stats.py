"""The numbers that a session's agent measured."""

import sqlalchemy as sa
from alembic import op

revision = "0023"
down_revision = "0022"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("sessions", sa.Column("stats", sa.JSON(), nullable=True))


def downgrade() -> None:
    op.drop_column("sessions", "stats")
