"""The facts that the trainer measures of each trained token."""

import sqlalchemy as sa
from alembic import op

revision = "0024"
down_revision = "0023"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "token_facts",
        sa.Column("step_id", sa.String(32), sa.ForeignKey("steps.id"), primary_key=True),
        sa.Column("trajectory_id", sa.String(32), sa.ForeignKey("trajectories.id"), primary_key=True),
        sa.Column("tokens", sa.Integer, nullable=False),
        sa.Column("data", sa.LargeBinary, nullable=False),
    )
    op.create_index("ix_token_facts_trajectory_id", "token_facts", ["trajectory_id"])


def downgrade() -> None:
    op.drop_table("token_facts")
