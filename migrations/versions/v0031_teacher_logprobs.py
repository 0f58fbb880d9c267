"""What teachers that are servers scored, of each trajectory, so that a step that is repeated reads the same numbers."""

import sqlalchemy as sa
from alembic import op

revision = "0031"
down_revision = "0030"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "teacher_logprobs",
        sa.Column("trajectory_id", sa.String(length=32), nullable=False),
        sa.Column("teacher", sa.String(length=1000), nullable=False),
        sa.Column("tokens", sa.Integer(), nullable=False),
        sa.Column("data", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(["trajectory_id"], ["trajectories.id"], name=op.f("fk_teacher_logprobs_trajectory_id")),
        sa.PrimaryKeyConstraint("trajectory_id", "teacher", name=op.f("pk_teacher_logprobs")),
    )


def downgrade() -> None:
    op.drop_table("teacher_logprobs")
