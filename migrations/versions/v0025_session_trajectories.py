"""How many trajectories a session has, so that those without any are counted and found by an index."""

import sqlalchemy as sa
from alembic import op

revision = "0025"
down_revision = "0024"
branch_labels = None
depends_on = None

BARE = sa.text("trajectories = 0")
UNTRAINED = sa.text("state != 'trained'")


def upgrade() -> None:
    op.add_column("sessions", sa.Column("trajectories", sa.Integer(), nullable=True))
    op.execute(
        "UPDATE sessions SET trajectories = (SELECT count(*) FROM trajectories WHERE session_id = sessions.id) "
        "WHERE built AND NOT is_eval"
    )
    op.create_index(
        "ix_sessions_bare", "sessions", ["run_id", "status", "id"], sqlite_where=BARE, postgresql_where=BARE
    )
    _untrained("run_id", "state", "reason", "id", "trainable_tokens")


def downgrade() -> None:
    _untrained("run_id", "state")
    op.drop_index("ix_sessions_bare", "sessions")
    op.drop_column("sessions", "trajectories")


def _untrained(*columns: str) -> None:
    op.drop_index("ix_trajectories_untrained", "trajectories")
    op.create_index(
        "ix_trajectories_untrained",
        "trajectories",
        list(columns),
        sqlite_where=UNTRAINED,
        postgresql_where=UNTRAINED,
    )
