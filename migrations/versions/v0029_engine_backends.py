"""The backend of each engine, because a run may have engines of several."""

import sqlalchemy as sa
from alembic import op

revision = "0029"
down_revision = "0028"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("engines", sa.Column("backend", sa.String(32)))


def downgrade() -> None:
    op.drop_column("engines", "backend")
