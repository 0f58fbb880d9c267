"""Groups that outside programs join by name: the name, the next check while places are free, the places given up.

On the way down, a group keeps only the sessions that it has. One that waits for more is rejected if all of them have
ended, as the older version would never look at it again.
"""

import sqlalchemy as sa
from alembic import op

revision = "0020"
down_revision = "0019"
branch_labels = None
depends_on = None

WHY = "not filled before a downgrade"
WAITING = """SELECT id FROM groups WHERE due_at IS NOT NULL AND NOT EXISTS (
    SELECT 1 FROM sessions WHERE sessions.group_id = groups.id AND NOT sessions.built)"""


def upgrade() -> None:
    op.add_column("groups", sa.Column("name", sa.String(length=200), nullable=True))
    op.add_column("groups", sa.Column("due_at", sa.Float(), nullable=True))
    op.add_column("groups", sa.Column("missing", sa.Integer(), server_default="0", nullable=False))
    op.execute("CREATE UNIQUE INDEX uq_groups_name ON groups (run_id, name) WHERE name IS NOT NULL")
    op.execute("CREATE INDEX ix_groups_due ON groups (run_id, due_at) WHERE due_at IS NOT NULL")


def downgrade() -> None:
    op.execute(
        """UPDATE groups SET size = (
               SELECT count(*) FROM sessions WHERE sessions.group_id = groups.id AND sessions.parent_session_id IS NULL
           ) WHERE due_at IS NOT NULL OR missing > 0"""
    )
    op.execute(
        f"""UPDATE trajectories SET state = 'rejected', reason = 'rejected: {WHY}'
            WHERE state = 'ready' AND group_id IN ({WAITING})"""
    )
    of_run = f"(SELECT count(*) FROM groups WHERE groups.run_id = runs.id AND groups.id IN ({WAITING}))"
    op.execute(f"UPDATE runs SET running = running - {of_run}, returned = returned + {of_run}")
    op.execute(
        f"""UPDATE groups SET state = 'rejected', reject_reason = '{WHY}', finished_at = due_at
            WHERE id IN ({WAITING})"""
    )
    op.execute("DROP INDEX ix_groups_due")
    op.execute("DROP INDEX uq_groups_name")
    op.drop_column("groups", "missing")
    op.drop_column("groups", "due_at")
    op.drop_column("groups", "name")
