"""Sources of tasks, and how much of each is stored. A run from before has one complete source, in its old order.

On the way down, the tasks of several sources become one list without gaps.
"""

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "task_sources",
        sa.Column("run_id", sa.String(length=32), nullable=False),
        sa.Column("source", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("name", sa.String(length=100), nullable=False),
        sa.Column("weight", sa.Float(), nullable=False),
        sa.Column("block", sa.Integer(), nullable=False),
        sa.Column("stored", sa.Integer(), nullable=False),
        sa.Column("rows_read", sa.Integer(), nullable=False),
        sa.Column("complete", sa.Boolean(), nullable=False),
        sa.Column("content", sa.JSON(), nullable=True),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_task_sources_run_id")),
        sa.PrimaryKeyConstraint("run_id", "source", name=op.f("pk_task_sources")),
    )
    op.execute(
        """INSERT INTO task_sources (run_id, source, name, weight, block, stored, rows_read, complete)
           SELECT run_id, 0, 'tasks', 1.0, 0, count(*), count(*), true FROM tasks GROUP BY run_id"""
    )


def downgrade() -> None:
    op.execute(
        """UPDATE tasks SET position = -1 - listed.position FROM (
               SELECT id, row_number() OVER (PARTITION BY run_id ORDER BY position) - 1 AS position FROM tasks
               WHERE run_id IN (SELECT run_id FROM task_sources WHERE source > 0)
           ) AS listed WHERE listed.id = tasks.id"""
    )
    op.execute("UPDATE tasks SET position = -1 - position WHERE position < 0")  # no two rows ever have one position
    op.drop_table("task_sources")
