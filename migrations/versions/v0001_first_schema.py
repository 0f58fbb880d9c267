"""The first schema: the whole lineage."""

import sqlalchemy as sa
from alembic import op

from agentrl.store.tables import LINEAGE_VIEW

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "contents",
        sa.Column("hash", sa.String(length=64), nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("hash", name=op.f("pk_contents")),
    )
    op.create_table(
        "runs",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("name", sa.String(length=200), nullable=False),
        sa.Column("config", sa.JSON(), nullable=False),
        sa.Column("base_model", sa.Text(), nullable=False),
        sa.Column("status", sa.String(length=16), nullable=False),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("key_hash", sa.String(length=64), nullable=False),
        sa.Column("seed", sa.BigInteger(), nullable=False),
        sa.Column("target_steps", sa.Integer(), nullable=False),
        sa.Column("current_version", sa.Integer(), nullable=False),
        sa.Column("published_step", sa.Integer(), nullable=False),
        sa.Column("trainer_epoch", sa.Integer(), nullable=False),
        sa.Column("data_cursor", sa.Integer(), nullable=False),
        sa.Column("admitted", sa.Integer(), nullable=False),
        sa.Column("returned", sa.Integer(), nullable=False),
        sa.Column("running", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("finished_at", sa.Float(), nullable=True),
        sa.CheckConstraint(
            "status IN ('running', 'stopping', 'paused', 'finished', 'failed')", name=op.f("ck_runs_status")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_runs")),
        sa.UniqueConstraint("name", name=op.f("uq_runs_name")),
    )
    with op.batch_alter_table("runs", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_runs_key_hash"), ["key_hash"], unique=False)

    op.create_table(
        "engines",
        sa.Column("run_id", sa.String(length=32), nullable=False),
        sa.Column("url", sa.String(length=300), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("version", sa.Integer(), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("last_seen_at", sa.Float(), nullable=False),
        sa.CheckConstraint("state IN ('serving', 'updating', 'dead')", name=op.f("ck_engines_state")),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_engines_run_id")),
        sa.PrimaryKeyConstraint("run_id", "url", name=op.f("pk_engines")),
    )
    op.create_table(
        "events",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("run_id", sa.String(length=32), nullable=False),
        sa.Column("kind", sa.String(length=50), nullable=False),
        sa.Column("source", sa.String(length=100), nullable=False),
        sa.Column("data", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_events_run_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_events")),
    )
    with op.batch_alter_table("events", schema=None) as batch_op:
        batch_op.create_index("ix_events_run_id_kind", ["run_id", "kind", "id"], unique=False)

    op.create_table(
        "steps",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("run_id", sa.String(length=32), nullable=False),
        sa.Column("epoch", sa.Integer(), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("version_before", sa.Integer(), nullable=False),
        sa.Column("version_after", sa.Integer(), nullable=True),
        sa.Column("wasted_tokens", sa.Integer(), nullable=False),
        sa.Column("metrics", sa.JSON(), nullable=False),
        sa.Column("started_at", sa.Float(), nullable=False),
        sa.Column("trained_at", sa.Float(), nullable=True),
        sa.Column("published_at", sa.Float(), nullable=True),
        sa.CheckConstraint("state IN ('started', 'trained', 'published', 'rolled_back')", name=op.f("ck_steps_state")),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_steps_run_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_steps")),
    )
    with op.batch_alter_table("steps", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_steps_run_id"), ["run_id"], unique=False)
        batch_op.create_index(
            "uq_steps_surviving",
            ["run_id", "step"],
            unique=True,
            sqlite_where=sa.text("state != 'rolled_back'"),
            postgresql_where=sa.text("state != 'rolled_back'"),
        )

    op.create_table(
        "tasks",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("run_id", sa.String(length=32), nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("data", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_tasks_run_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_tasks")),
        sa.UniqueConstraint("run_id", "position", name=op.f("uq_tasks_run_id_position")),
    )
    op.create_table(
        "weight_versions",
        sa.Column("run_id", sa.String(length=32), nullable=False),
        sa.Column("version", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("parent_version", sa.Integer(), nullable=True),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("path", sa.Text(), nullable=True),
        sa.Column("checksum", sa.String(length=64), nullable=True),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("published_at", sa.Float(), nullable=True),
        sa.CheckConstraint("state IN ('pending', 'published', 'rolled_back')", name=op.f("ck_weight_versions_state")),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_weight_versions_run_id")),
        sa.PrimaryKeyConstraint("run_id", "version", name=op.f("pk_weight_versions")),
    )
    op.create_table(
        "groups",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("run_id", sa.String(length=32), nullable=False),
        sa.Column("task_id", sa.String(length=32), nullable=True),
        sa.Column("cursor", sa.Integer(), nullable=True),
        sa.Column("task", sa.JSON(), nullable=True),
        sa.Column("size", sa.Integer(), nullable=False),
        sa.Column("is_eval", sa.Boolean(), nullable=False),
        sa.Column("external", sa.Boolean(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("sampling", sa.JSON(), nullable=True),
        sa.Column("owner", sa.String(length=100), nullable=True),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("finished_at", sa.Float(), nullable=True),
        sa.CheckConstraint(
            "state IN ('running', 'ready', 'leased', 'trained', 'stale', 'rejected', 'evaluated')",
            name=op.f("ck_groups_state"),
        ),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_groups_run_id")),
        sa.ForeignKeyConstraint(["task_id"], ["tasks.id"], name=op.f("fk_groups_task_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_groups")),
        sa.UniqueConstraint("run_id", "cursor", name=op.f("uq_groups_run_id_cursor")),
    )
    with op.batch_alter_table("groups", schema=None) as batch_op:
        batch_op.create_index(
            "ix_groups_leased",
            ["run_id", "id"],
            unique=False,
            sqlite_where=sa.text("state = 'leased'"),
            postgresql_where=sa.text("state = 'leased'"),
        )
        batch_op.create_index(
            "ix_groups_ready",
            ["run_id", "id"],
            unique=False,
            sqlite_where=sa.text("state = 'ready'"),
            postgresql_where=sa.text("state = 'ready'"),
        )

    op.create_table(
        "sessions",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("run_id", sa.String(length=32), nullable=False),
        sa.Column("group_id", sa.String(length=32), nullable=False),
        sa.Column("sample_index", sa.Integer(), nullable=False),
        sa.Column("key_hash", sa.String(length=64), nullable=False),
        sa.Column("status", sa.String(length=16), nullable=False),
        sa.Column("seq", sa.Integer(), nullable=False),
        sa.Column("is_eval", sa.Boolean(), nullable=False),
        sa.Column("built", sa.Boolean(), nullable=False),
        sa.Column("metadata", sa.JSON(), nullable=False),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("parent_session_id", sa.String(length=32), nullable=True),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("last_seen_at", sa.Float(), nullable=False),
        sa.Column("ended_at", sa.Float(), nullable=True),
        sa.CheckConstraint(
            "status IN ('open', 'closing', 'completed', 'failed', 'abandoned')", name=op.f("ck_sessions_status")
        ),
        sa.ForeignKeyConstraint(["group_id"], ["groups.id"], name=op.f("fk_sessions_group_id")),
        sa.ForeignKeyConstraint(["parent_session_id"], ["sessions.id"], name=op.f("fk_sessions_parent_session_id")),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_sessions_run_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_sessions")),
        sa.UniqueConstraint("group_id", "sample_index", name=op.f("uq_sessions_group_id_sample_index")),
    )
    with op.batch_alter_table("sessions", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_sessions_group_id"), ["group_id"], unique=False)
        batch_op.create_index(batch_op.f("ix_sessions_key_hash"), ["key_hash"], unique=False)
        batch_op.create_index(
            "ix_sessions_unbuilt",
            ["run_id", "last_seen_at"],
            unique=False,
            sqlite_where=sa.text("built IS 0"),
            postgresql_where=sa.text("built IS false"),
        )

    op.create_table(
        "interactions",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("run_id", sa.String(length=32), nullable=False),
        sa.Column("session_id", sa.String(length=32), nullable=False),
        sa.Column("parent_id", sa.String(length=32), nullable=True),
        sa.Column("seq", sa.Integer(), nullable=True),
        sa.Column("dialect", sa.String(length=32), nullable=False),
        sa.Column("status", sa.String(length=16), nullable=False),
        sa.Column("role", sa.String(length=16), nullable=False),
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("replica", sa.String(length=64), nullable=False),
        sa.Column("engine_url", sa.Text(), nullable=True),
        sa.Column("params", sa.JSON(), nullable=False),
        sa.Column("temperature", sa.Float(), nullable=False),
        sa.Column("tools_hash", sa.String(length=64), nullable=True),
        sa.Column("conversation_key", sa.String(length=64), nullable=True),
        sa.Column("fork_reason", sa.String(length=32), nullable=True),
        sa.Column("bridged", sa.Boolean(), nullable=False),
        sa.Column("distribution_modified", sa.Boolean(), nullable=False),
        sa.Column("kv_mixed", sa.Boolean(), nullable=False),
        sa.Column("trainable", sa.Boolean(), nullable=False),
        sa.Column("prompt_tokens", sa.Integer(), nullable=False),
        sa.Column("prompt_digest", sa.String(length=32), nullable=False),
        sa.Column("output_tokens", sa.Integer(), nullable=False),
        sa.Column("cached_tokens", sa.Integer(), nullable=True),
        sa.Column("min_version", sa.Integer(), nullable=True),
        sa.Column("max_version", sa.Integer(), nullable=True),
        sa.Column("finish_reason", sa.String(length=32), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("first_token_at", sa.Float(), nullable=True),
        sa.Column("finished_at", sa.Float(), nullable=True),
        sa.CheckConstraint(
            "status IN ('running', 'complete', 'aborted', 'lost', 'failed')", name=op.f("ck_interactions_status")
        ),
        sa.ForeignKeyConstraint(["parent_id"], ["interactions.id"], name=op.f("fk_interactions_parent_id")),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_interactions_run_id")),
        sa.ForeignKeyConstraint(["session_id"], ["sessions.id"], name=op.f("fk_interactions_session_id")),
        sa.ForeignKeyConstraint(["tools_hash"], ["contents.hash"], name=op.f("fk_interactions_tools_hash")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_interactions")),
    )
    with op.batch_alter_table("interactions", schema=None) as batch_op:
        batch_op.create_index(
            "ix_interactions_running",
            ["replica"],
            unique=False,
            sqlite_where=sa.text("status = 'running'"),
            postgresql_where=sa.text("status = 'running'"),
        )
        batch_op.create_index(batch_op.f("ix_interactions_session_id"), ["session_id"], unique=False)

    op.create_table(
        "interaction_data",
        sa.Column("interaction_id", sa.String(length=32), nullable=False),
        sa.Column("new_messages", sa.LargeBinary(), nullable=False),
        sa.Column("answer", sa.LargeBinary(), nullable=False),
        sa.Column("prompt_delta_ids", sa.LargeBinary(), nullable=False),
        sa.Column("output_ids", sa.LargeBinary(), nullable=False),
        sa.Column("logprobs", sa.LargeBinary(), nullable=False),
        sa.Column("spans", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(
            ["interaction_id"], ["interactions.id"], name=op.f("fk_interaction_data_interaction_id")
        ),
        sa.PrimaryKeyConstraint("interaction_id", name=op.f("pk_interaction_data")),
    )
    op.create_table(
        "rewards",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("run_id", sa.String(length=32), nullable=False),
        sa.Column("session_id", sa.String(length=32), nullable=False),
        sa.Column("interaction_id", sa.String(length=32), nullable=True),
        sa.Column("name", sa.String(length=100), nullable=False),
        sa.Column("value", sa.Float(), nullable=False),
        sa.Column("source", sa.String(length=100), nullable=False),
        sa.Column("idempotency_key", sa.String(length=200), nullable=True),
        sa.Column("applied", sa.Boolean(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(["interaction_id"], ["interactions.id"], name=op.f("fk_rewards_interaction_id")),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_rewards_run_id")),
        sa.ForeignKeyConstraint(["session_id"], ["sessions.id"], name=op.f("fk_rewards_session_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_rewards")),
        sa.UniqueConstraint("session_id", "idempotency_key", name=op.f("uq_rewards_session_id_idempotency_key")),
    )
    with op.batch_alter_table("rewards", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_rewards_session_id"), ["session_id"], unique=False)

    op.create_table(
        "trajectories",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("run_id", sa.String(length=32), nullable=False),
        sa.Column("group_id", sa.String(length=32), nullable=False),
        sa.Column("session_id", sa.String(length=32), nullable=False),
        sa.Column("leaf_id", sa.String(length=32), nullable=False),
        sa.Column("tokens", sa.Integer(), nullable=False),
        sa.Column("trainable_tokens", sa.Integer(), nullable=False),
        sa.Column("min_version", sa.Integer(), nullable=True),
        sa.Column("max_version", sa.Integer(), nullable=True),
        sa.Column("return", sa.Float(), nullable=True),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("reason", sa.String(length=100), nullable=True),
        sa.Column("lease_epoch", sa.Integer(), nullable=True),
        sa.Column("lease_step_id", sa.String(length=32), nullable=True),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.CheckConstraint(
            "state IN ('ready', 'leased', 'trained', 'stale', 'rejected')", name=op.f("ck_trajectories_state")
        ),
        sa.ForeignKeyConstraint(["group_id"], ["groups.id"], name=op.f("fk_trajectories_group_id")),
        sa.ForeignKeyConstraint(["leaf_id"], ["interactions.id"], name=op.f("fk_trajectories_leaf_id")),
        sa.ForeignKeyConstraint(["lease_step_id"], ["steps.id"], name=op.f("fk_trajectories_lease_step_id")),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_trajectories_run_id")),
        sa.ForeignKeyConstraint(["session_id"], ["sessions.id"], name=op.f("fk_trajectories_session_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_trajectories")),
    )
    with op.batch_alter_table("trajectories", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_trajectories_group_id"), ["group_id"], unique=False)
        batch_op.create_index(batch_op.f("ix_trajectories_session_id"), ["session_id"], unique=False)

    op.create_table(
        "step_trajectories",
        sa.Column("step_id", sa.String(length=32), nullable=False),
        sa.Column("trajectory_id", sa.String(length=32), nullable=False),
        sa.Column("advantage", sa.Float(), nullable=False),
        sa.Column("staleness_max", sa.Integer(), nullable=False),
        sa.Column("staleness_mean", sa.Float(), nullable=False),
        sa.Column("tokens_trained", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(["step_id"], ["steps.id"], name=op.f("fk_step_trajectories_step_id")),
        sa.ForeignKeyConstraint(
            ["trajectory_id"], ["trajectories.id"], name=op.f("fk_step_trajectories_trajectory_id")
        ),
        sa.PrimaryKeyConstraint("step_id", "trajectory_id", name=op.f("pk_step_trajectories")),
    )
    with op.batch_alter_table("step_trajectories", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_step_trajectories_trajectory_id"), ["trajectory_id"], unique=False)

    op.create_table(
        "trajectory_interactions",
        sa.Column("trajectory_id", sa.String(length=32), nullable=False),
        sa.Column("position", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("interaction_id", sa.String(length=32), nullable=False),
        sa.Column("owned", sa.Boolean(), nullable=False),
        sa.ForeignKeyConstraint(
            ["interaction_id"], ["interactions.id"], name=op.f("fk_trajectory_interactions_interaction_id")
        ),
        sa.ForeignKeyConstraint(
            ["trajectory_id"], ["trajectories.id"], name=op.f("fk_trajectory_interactions_trajectory_id")
        ),
        sa.PrimaryKeyConstraint("trajectory_id", "position", name=op.f("pk_trajectory_interactions")),
    )
    with op.batch_alter_table("trajectory_interactions", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_trajectory_interactions_interaction_id"), ["interaction_id"], unique=False)

    op.execute(LINEAGE_VIEW)


def downgrade() -> None:
    op.execute("DROP VIEW lineage")
    with op.batch_alter_table("trajectory_interactions", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_trajectory_interactions_interaction_id"))

    op.drop_table("trajectory_interactions")
    with op.batch_alter_table("step_trajectories", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_step_trajectories_trajectory_id"))

    op.drop_table("step_trajectories")
    with op.batch_alter_table("trajectories", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_trajectories_session_id"))
        batch_op.drop_index(batch_op.f("ix_trajectories_group_id"))

    op.drop_table("trajectories")
    with op.batch_alter_table("rewards", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_rewards_session_id"))

    op.drop_table("rewards")
    op.drop_table("interaction_data")
    with op.batch_alter_table("interactions", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_interactions_session_id"))
        batch_op.drop_index(
            "ix_interactions_running",
            sqlite_where=sa.text("status = 'running'"),
            postgresql_where=sa.text("status = 'running'"),
        )

    op.drop_table("interactions")
    with op.batch_alter_table("sessions", schema=None) as batch_op:
        batch_op.drop_index(
            "ix_sessions_unbuilt", sqlite_where=sa.text("built IS 0"), postgresql_where=sa.text("built IS false")
        )
        batch_op.drop_index(batch_op.f("ix_sessions_key_hash"))
        batch_op.drop_index(batch_op.f("ix_sessions_group_id"))

    op.drop_table("sessions")
    with op.batch_alter_table("groups", schema=None) as batch_op:
        batch_op.drop_index(
            "ix_groups_ready", sqlite_where=sa.text("state = 'ready'"), postgresql_where=sa.text("state = 'ready'")
        )
        batch_op.drop_index(
            "ix_groups_leased", sqlite_where=sa.text("state = 'leased'"), postgresql_where=sa.text("state = 'leased'")
        )

    op.drop_table("groups")
    op.drop_table("weight_versions")
    op.drop_table("tasks")
    with op.batch_alter_table("steps", schema=None) as batch_op:
        batch_op.drop_index(
            "uq_steps_surviving",
            sqlite_where=sa.text("state != 'rolled_back'"),
            postgresql_where=sa.text("state != 'rolled_back'"),
        )
        batch_op.drop_index(batch_op.f("ix_steps_run_id"))

    op.drop_table("steps")
    with op.batch_alter_table("events", schema=None) as batch_op:
        batch_op.drop_index("ix_events_run_id_kind")

    op.drop_table("events")
    op.drop_table("engines")
    with op.batch_alter_table("runs", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_runs_key_hash"))

    op.drop_table("runs")
    op.drop_table("contents")
