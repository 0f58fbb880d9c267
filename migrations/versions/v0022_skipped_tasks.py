"""Tasks that a curriculum skipped, and an index that finds the groups of a task."""

import sqlalchemy as sa
from alembic import op

revision = "0022"
down_revision = "0021"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "skipped_tasks",
        sa.Column("run_id", sa.String(length=32), nullable=False),
        sa.Column("cursor", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("task_id", sa.String(length=32), nullable=False),
        sa.Column("success_rate", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_skipped_tasks_run_id")),
        sa.ForeignKeyConstraint(["task_id"], ["tasks.id"], name=op.f("fk_skipped_tasks_task_id")),
        sa.PrimaryKeyConstraint("run_id", "cursor", name=op.f("pk_skipped_tasks")),
    )
    op.create_index(
        "ix_groups_task",
        "groups",
        ["task_id", "cursor"],
        sqlite_where=sa.text("task_id IS NOT NULL"),
        postgresql_where=sa.text("task_id IS NOT NULL"),
    )


def downgrade() -> None:
    op.drop_index("ix_groups_task", table_name="groups")
    op.drop_table("skipped_tasks")
