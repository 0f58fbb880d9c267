"""What a session answered, for the vote of an evaluation's samples."""

import sqlalchemy as sa
from alembic import op

revision = "0021"
down_revision = "0020"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("sessions", sa.Column("answer", sa.String(length=500), nullable=True))


def downgrade() -> None:
    op.drop_column("sessions", "answer")
