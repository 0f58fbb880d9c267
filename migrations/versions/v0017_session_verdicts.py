"""Which tokens of a session train, as its agent said at its end."""

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("sessions", sa.Column("verdict", sa.JSON(), nullable=True))


def downgrade() -> None:
    op.drop_column("sessions", "verdict")
