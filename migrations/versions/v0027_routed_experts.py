"""The experts that an engine chose at the positions of a call."""

import sqlalchemy as sa
from alembic import op

revision = "0027"
down_revision = "0026"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "routed_experts",
        sa.Column("interaction_id", sa.String(32), sa.ForeignKey("interactions.id"), primary_key=True),
        sa.Column("start", sa.Integer, nullable=False),
        sa.Column("computed_from", sa.Integer, nullable=False),
        sa.Column("recorded", sa.Integer, nullable=False),
        sa.Column("recomputed", sa.Integer, nullable=False),
        sa.Column("missing", sa.Integer, nullable=False),
        sa.Column("data", sa.LargeBinary, nullable=False),
    )
    if op.get_bind().dialect.name == "postgresql":  # it is compressed already
        op.execute("ALTER TABLE routed_experts ALTER COLUMN data SET STORAGE EXTERNAL")


def downgrade() -> None:
    op.drop_table("routed_experts")
