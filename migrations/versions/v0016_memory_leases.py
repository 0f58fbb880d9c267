"""The trainer's turns on the GPUs of engines, the state of an engine without memory, and engines that are starting."""

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "memory_leases",
        sa.Column("run_id", sa.String(length=32), nullable=False),
        sa.Column("epoch", sa.Integer(), nullable=False),
        sa.Column("until", sa.Float(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=True),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_memory_leases_run_id")),
        sa.PrimaryKeyConstraint("run_id", name=op.f("pk_memory_leases")),
    )
    op.execute("ALTER TABLE engines ADD COLUMN starting_until FLOAT")
    _allow("'serving', 'updating', 'released', 'dead'")


def downgrade() -> None:
    op.execute("UPDATE engines SET state = 'dead' WHERE state = 'released'")
    _allow("'serving', 'updating', 'dead'")
    op.execute("ALTER TABLE engines DROP COLUMN starting_until")
    op.drop_table("memory_leases")


def _allow(states: str) -> None:
    with op.batch_alter_table("engines") as engines:
        engines.drop_constraint(op.f("ck_engines_state"), type_="check")
        engines.create_check_constraint(op.f("ck_engines_state"), f"state IN ({states})")
