"""The trajectories of groups that a later step trains once more, and by which step."""

import sqlalchemy as sa
from alembic import op

revision = "0032"
down_revision = "0030"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "replays",
        sa.Column("step_id", sa.String(32), sa.ForeignKey("steps.id"), primary_key=True),
        sa.Column("trajectory_id", sa.String(32), sa.ForeignKey("trajectories.id"), primary_key=True),
        sa.Column("stale", sa.Boolean, nullable=False),
    )
    op.create_index(op.f("ix_replays_trajectory_id"), "replays", ["trajectory_id"])


def downgrade() -> None:
    op.drop_index(op.f("ix_replays_trajectory_id"), "replays")
    op.drop_table("replays")
