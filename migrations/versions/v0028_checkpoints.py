"""The durable checkpoint of a step: its digest, its size, and whether object storage has it."""

import sqlalchemy as sa
from alembic import op

revision = "0028"
down_revision = "0027"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "checkpoints",
        sa.Column("step_id", sa.String(32), sa.ForeignKey("steps.id"), primary_key=True),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("size_bytes", sa.BigInteger, nullable=False),
        sa.Column("written_at", sa.Float, nullable=False),
        sa.Column("stored_at", sa.Float),
    )


def downgrade() -> None:
    op.drop_table("checkpoints")
