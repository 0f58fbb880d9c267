"""The sessions whose spans are to be sent to a receiver of traces."""

import sqlalchemy as sa
from alembic import op

revision = "0026"
down_revision = "0025"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "unsent_traces",
        sa.Column("session_id", sa.String(32), sa.ForeignKey("sessions.id"), primary_key=True),
        sa.Column("run_id", sa.String(32), sa.ForeignKey("runs.id"), nullable=False),
        sa.Column("due_at", sa.Float, nullable=False),
    )
    op.create_index("ix_unsent_traces_due", "unsent_traces", ["run_id", "due_at", "session_id"])


def downgrade() -> None:
    op.drop_table("unsent_traces")
