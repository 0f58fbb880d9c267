"""The trajectories that a later step trains once more, and the rising window of a source of tasks."""

import sqlalchemy as sa
from alembic import op

revision = "0032"
down_revision = "0031"
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
    op.add_column("task_sources", sa.Column("window", sa.JSON))


def downgrade() -> None:
    op.drop_column("task_sources", "window")
    op.drop_index(op.f("ix_replays_trajectory_id"), "replays")
    op.drop_table("replays")
