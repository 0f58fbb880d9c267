"""Deadlines and heartbeats of sessions, scopes of rewards, idempotent starts, and the totals of a step's batch.

Columns are added by plain ALTER TABLE: on SQLite rebuilding a table that others refer to would break its foreign keys.
"""

import json

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

NEW_COLUMNS = {
    "groups": ["start_digest VARCHAR(32)"],
    "sessions": ["due_at FLOAT NOT NULL DEFAULT 0"],
    "rewards": [
        "scope VARCHAR(16) NOT NULL DEFAULT 'session' CONSTRAINT ck_rewards_scope "
        "CHECK (scope IN ('session', 'branch', 'call'))"
    ],
    "steps": [
        "max_staleness INTEGER NOT NULL DEFAULT 0",
        "turn_discount FLOAT NOT NULL DEFAULT 1",
        "estimator VARCHAR(32)",
        "batch_digest VARCHAR(32)",
        '"groups" INTEGER NOT NULL DEFAULT 0',  # quoted: a keyword in SQLite
        "trajectories INTEGER NOT NULL DEFAULT 0",
        "tokens_trained INTEGER NOT NULL DEFAULT 0",
        "staleness_max INTEGER",
        "return_mean FLOAT",
    ],
}
BLOBS = ("new_messages", "answer", "prompt_delta_ids", "output_ids", "logprobs")


def upgrade() -> None:
    for table, columns in NEW_COLUMNS.items():
        for column in columns:
            op.execute(f'ALTER TABLE "{table}" ADD COLUMN {column}')
    op.execute("UPDATE rewards SET scope = 'call' WHERE interaction_id IS NOT NULL")
    op.execute(
        "UPDATE steps SET trajectories = (SELECT count(*) FROM step_trajectories WHERE step_id = steps.id), "
        "tokens_trained = (SELECT coalesce(sum(tokens_trained), 0) FROM step_trajectories WHERE step_id = steps.id), "
        "staleness_max = (SELECT max(staleness_max) FROM step_trajectories WHERE step_id = steps.id), "
        '"groups" = (SELECT count(DISTINCT t.group_id) FROM step_trajectories st '
        "JOIN trajectories t ON t.id = st.trajectory_id WHERE st.step_id = steps.id), "
        'return_mean = (SELECT avg(t."return") FROM step_trajectories st '
        "JOIN trajectories t ON t.id = st.trajectory_id WHERE st.step_id = steps.id)"
    )
    _settings_of_old_steps()
    op.create_table(
        "heartbeats",
        sa.Column("run_id", sa.String(32), sa.ForeignKey("runs.id", name="fk_heartbeats_run_id"), nullable=False),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("name", sa.String(100), nullable=False),
        sa.Column("started_at", sa.Float(), nullable=False),
        sa.Column("last_seen_at", sa.Float(), nullable=False),
        sa.CheckConstraint("kind IN ('proxy', 'worker')", name=op.f("ck_heartbeats_kind")),
        sa.PrimaryKeyConstraint("run_id", "kind", "name", name="pk_heartbeats"),
    )
    op.create_index("uq_groups_start", "groups", ["run_id", "start_digest"], unique=True)
    for name in ("ix_groups_ready", "ix_groups_leased"):
        op.drop_index(name, "groups")
    _partial("ix_groups_untrained", "groups", ["run_id", "state", "id"], "state != 'trained'")
    op.drop_index("ix_sessions_unbuilt", "sessions")
    _partial("ix_sessions_due", "sessions", ["run_id", "due_at"], "built IS {false}")
    _partial("ix_sessions_eval", "sessions", ["run_id", "id"], "is_eval IS {true}")
    _partial("ix_sessions_children", "sessions", ["parent_session_id"], "parent_session_id IS NOT NULL")
    _partial("ix_trajectories_untrained", "trajectories", ["run_id", "state"], "state != 'trained'")
    op.create_index("ix_trajectories_lease_step_id", "trajectories", ["lease_step_id"])
    if op.get_bind().dialect.name == "postgresql":  # PostgreSQL need not compress columns that zstd has compressed
        for column in BLOBS:
            op.execute(f"ALTER TABLE interaction_data ALTER COLUMN {column} SET STORAGE EXTERNAL")


def _settings_of_old_steps() -> None:
    """Copy the settings of older steps from the configuration of their run, so that their batches can be rebuilt."""
    bind = op.get_bind()
    for run_id, config in bind.execute(sa.text("SELECT id, config FROM runs")).all():
        settings = json.loads(config) if isinstance(config, str) else config
        bind.execute(
            sa.text("UPDATE steps SET max_staleness = :staleness, turn_discount = :discount WHERE run_id = :run"),
            {
                "run": run_id,
                "staleness": (settings.get("trainer") or {}).get("max_staleness", 1),
                "discount": (settings.get("rollout") or {}).get("turn_discount", 1.0),
            },
        )


def downgrade() -> None:
    if op.get_bind().dialect.name == "postgresql":
        for column in BLOBS:
            op.execute(f"ALTER TABLE interaction_data ALTER COLUMN {column} SET STORAGE EXTENDED")
    for name in ("ix_trajectories_lease_step_id", "ix_trajectories_untrained"):
        op.drop_index(name, "trajectories")
    for name in ("ix_sessions_children", "ix_sessions_eval", "ix_sessions_due"):
        op.drop_index(name, "sessions")
    for name in ("ix_groups_untrained", "uq_groups_start"):
        op.drop_index(name, "groups")
    _partial("ix_sessions_unbuilt", "sessions", ["run_id", "last_seen_at"], "built IS {false}")
    _partial("ix_groups_ready", "groups", ["run_id", "id"], "state = 'ready'")
    _partial("ix_groups_leased", "groups", ["run_id", "id"], "state = 'leased'")
    op.drop_table("heartbeats")
    for table, columns in NEW_COLUMNS.items():
        for column in columns:
            op.execute(f'ALTER TABLE "{table}" DROP COLUMN {column.split()[0]}')


def _partial(name: str, table: str, columns: list[str], where: str) -> None:
    """A partial index; SQLite writes booleans as numbers."""
    op.create_index(
        name,
        table,
        columns,
        sqlite_where=sa.text(where.format(true=1, false=0)),
        postgresql_where=sa.text(where.format(true="true", false="false")),
    )
