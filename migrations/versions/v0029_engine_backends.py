"""The backend of each engine, and which engines sampled a call, because a run may have engines of several backends."""

import sqlalchemy as sa
from alembic import op

revision = "0029"
down_revision = "0028"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("engines", sa.Column("backend", sa.String(32)))
    op.add_column("interactions", sa.Column("engine_backend", sa.String(32)))
    op.add_column("interactions", sa.Column("engine_spans", sa.JSON))


def downgrade() -> None:
    op.drop_column("interactions", "engine_spans")
    op.drop_column("interactions", "engine_backend")
    op.drop_column("engines", "backend")
