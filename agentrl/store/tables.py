"""The schema: one lineage from a model call to the optimizer step that trained on it (SQLAlchemy Core).

    runs ─┬─ weight_versions
          ├─ task_sources, skipped_tasks → tasks
          ├─ tasks ── groups ── sessions ─┬─ interactions ── interaction_data, routed_experts
          │                               ├─ rewards, unsent_traces
          │                               └─ trajectories ── trajectory_interactions → interactions
          ├─ steps ─┬─ step_trajectories, replays, token_facts → trajectories
          │         └─ checkpoints
          ├─ parts ── part_ranks
          └─ engines, memory_leases, heartbeats, events, keys, contents

Ids are 32 hex digits, time-ordered. Times are seconds since the epoch. Token arrays are packed (see `codec`) and live
in `interaction_data`, apart from the rows that are scanned and claimed. Alembic builds the database; a test asserts
that the database matches this module.
"""

from __future__ import annotations

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
    false,
)

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
    }
)

Id = String(32)


def _one_of(column: str, *values: str) -> CheckConstraint:
    return CheckConstraint(f"{column} IN ({', '.join(repr(v) for v in values)})", name=column)


runs = Table(
    "runs",
    metadata,
    Column("id", Id, primary_key=True),
    Column("name", String(200), nullable=False, unique=True),
    Column("config", JSON, nullable=False),
    Column("base_model", Text, nullable=False),
    Column("status", String(16), nullable=False),
    Column("error", Text),
    Column("key_hash", String(64), nullable=False, index=True),
    Column("seed", BigInteger, nullable=False),
    Column("target_steps", Integer, nullable=False),
    # Weights: the version that every serving engine has, and the step that made it.
    Column("current_version", Integer, nullable=False, default=0),
    Column("published_step", Integer, nullable=False, default=0),
    Column("trainer_epoch", Integer, nullable=False, default=0),
    # Admission (staleness.py). Derivable from the rows of `groups`; kept here so that one UPDATE decides.
    Column("data_cursor", Integer, nullable=False, default=0),
    Column("admitted", Integer, nullable=False, default=0),
    Column("returned", Integer, nullable=False, default=0),
    Column("running", Integer, nullable=False, default=0),
    # Turns: when workers and outside programs were last refused a place, and which side got the last place.
    Column("worker_asked_at", Float),
    Column("outside_asked_at", Float),
    Column("outside_had_last", Boolean, nullable=False, default=False),
    Column("engines_gone", Integer, nullable=False, server_default="0"),  # engines that have left so far
    Column("created_at", Float, nullable=False),
    Column("finished_at", Float),
    _one_of("status", "running", "stopping", "paused", "finished", "failed"),
)

weight_versions = Table(
    "weight_versions",
    metadata,
    Column("run_id", ForeignKey("runs.id"), primary_key=True),
    Column("version", Integer, primary_key=True, autoincrement=False),
    Column("parent_version", Integer),
    Column("step", Integer, nullable=False),
    Column("path", Text),
    Column("checksum", String(64)),
    Column("state", String(16), nullable=False),
    Column("created_at", Float, nullable=False),
    Column("published_at", Float),
    _one_of("state", "pending", "published", "rolled_back"),
)

tasks = Table(
    "tasks",
    metadata,
    Column("id", Id, primary_key=True),
    Column("run_id", ForeignKey("runs.id"), nullable=False),
    Column("position", Integer, nullable=False),  # k·n + s: task k of source s, of n sources
    Column("data", JSON, nullable=False),
    UniqueConstraint("run_id", "position"),
)

# How much of each source of tasks is stored. A source grows only from the state that its reader has seen.
task_sources = Table(
    "task_sources",
    metadata,
    Column("run_id", ForeignKey("runs.id"), primary_key=True),
    Column("source", Integer, primary_key=True, autoincrement=False),
    Column("name", String(100), nullable=False),
    Column("weight", Float, nullable=False),
    Column("block", Integer, nullable=False),  # tasks that the first pass shuffles together; 0: the order of old runs
    Column("stored", Integer, nullable=False),  # tasks
    Column("rows_read", Integer, nullable=False),  # rows of the source, those that were left out included
    Column("complete", Boolean, nullable=False),
    Column("content", JSON),  # what identifies the files that are read
    Column("window", JSON),  # width and over of a source in ascending order, from whose rising window tasks are drawn
)

groups = Table(
    "groups",
    metadata,
    Column("id", Id, primary_key=True),
    Column("run_id", ForeignKey("runs.id"), nullable=False),
    Column("task_id", ForeignKey("tasks.id")),
    Column("cursor", Integer),  # position of the run's data cursor; null outside the run's own data
    Column("reject_reason", String(100)),  # why a filter rejected it, or which sessions it lacked
    Column("task", JSON),  # the data of a task that is not the run's own
    Column("size", Integer, nullable=False),
    Column("name", String(200)),  # by which outside programs join it
    Column("due_at", Float),  # while sessions may join it: when the sweep checks it next; else null
    Column("missing", Integer, nullable=False, default=0, server_default="0"),  # places that were given up
    Column("is_eval", Boolean, nullable=False),
    Column("external", Boolean, nullable=False),
    Column("state", String(16), nullable=False),
    Column("sampling", JSON),
    Column("owner", String(100)),  # the worker that runs it and sends heartbeats
    Column("start_digest", String(32)),  # of the request's idempotency key: a repeated start gets the same group
    Column("created_at", Float, nullable=False),
    Column("finished_at", Float),
    UniqueConstraint("run_id", "cursor"),
    _one_of("state", "running", "ready", "leased", "trained", "stale", "rejected", "evaluated"),
)
Index("uq_groups_start", groups.c.run_id, groups.c.start_digest, unique=True)
Index(
    "uq_groups_name",
    groups.c.run_id,
    groups.c.name,
    unique=True,
    sqlite_where=groups.c.name.is_not(None),
    postgresql_where=groups.c.name.is_not(None),
)
Index(
    "ix_groups_due",
    groups.c.run_id,
    groups.c.due_at,
    sqlite_where=groups.c.due_at.is_not(None),
    postgresql_where=groups.c.due_at.is_not(None),
)
# Few groups are untrained: claims and counts read this index, which does not grow with the run.
Index(
    "ix_groups_untrained",
    groups.c.run_id,
    groups.c.state,
    groups.c.id,
    sqlite_where=groups.c.state != "trained",
    postgresql_where=groups.c.state != "trained",
)

Index(
    "ix_groups_task",
    groups.c.task_id,
    groups.c.cursor,
    sqlite_where=groups.c.task_id.is_not(None),
    postgresql_where=groups.c.task_id.is_not(None),
)

# Positions of the data cursor whose task was skipped, because its success rate is outside the curriculum's target.
skipped_tasks = Table(
    "skipped_tasks",
    metadata,
    Column("run_id", ForeignKey("runs.id"), primary_key=True),
    Column("cursor", Integer, primary_key=True, autoincrement=False),
    Column("task_id", ForeignKey("tasks.id"), nullable=False),
    Column("success_rate", Float, nullable=False),  # of the task's last groups, at that time
)

sessions = Table(
    "sessions",
    metadata,
    Column("id", Id, primary_key=True),
    Column("run_id", ForeignKey("runs.id"), nullable=False),
    Column("group_id", ForeignKey("groups.id"), nullable=False, index=True),
    Column("sample_index", Integer, nullable=False),
    Column("key_hash", String(64), nullable=False, index=True),
    Column("status", String(16), nullable=False),
    Column("seq", Integer, nullable=False, default=0),  # grows with every committed change of the session's tree
    Column("is_eval", Boolean, nullable=False),
    Column("is_baseline", Boolean, nullable=False, default=False, server_default=false()),  # greedy: never trained
    Column("built", Boolean, nullable=False, default=False),  # its trajectories exist, or it has none
    Column("trajectories", Integer),  # how many it has; null until it is built, and for an evaluation
    Column("metadata", JSON, nullable=False),
    Column("error", Text),
    Column("answer", String(500)),  # what the episode answered (domain/answer_text.py); null: nothing
    Column("verdict", JSON),  # which of its tokens train, as its agent said at its end (domain/verdicts.py); null: all
    Column("stats", JSON),  # name → number, as its agent measured (domain/session_stats.py); null: none
    Column("parent_session_id", ForeignKey("sessions.id")),  # a sub-agent's session; of the same group
    Column("root_session_id", ForeignKey("sessions.id")),  # the root of its tree; null for a root itself
    Column("depth", Integer, nullable=False, default=0),  # levels below the root
    Column("name", String(200)),  # the name by which a client opened it
    Column("created_at", Float, nullable=False),
    Column("last_seen_at", Float, nullable=False),
    Column("due_at", Float, nullable=False),  # until it is built: when the sweep checks it next
    Column("ended_at", Float),
    UniqueConstraint("group_id", "sample_index"),
    _one_of("status", "open", "closing", "completed", "failed", "abandoned"),
)
Index(
    "ix_sessions_due",
    sessions.c.run_id,
    sessions.c.due_at,
    sqlite_where=sessions.c.built.is_(False),
    postgresql_where=sessions.c.built.is_(False),
)
Index(
    "ix_sessions_eval",
    sessions.c.run_id,
    sessions.c.id,
    sqlite_where=sessions.c.is_eval.is_(True),
    postgresql_where=sessions.c.is_eval.is_(True),
)
Index(  # ended sessions without trajectories, by their status; few
    "ix_sessions_bare",
    sessions.c.run_id,
    sessions.c.status,
    sessions.c.id,
    sqlite_where=sessions.c.trajectories == 0,
    postgresql_where=sessions.c.trajectories == 0,
)
Index(
    "ix_sessions_children",
    sessions.c.parent_session_id,
    sqlite_where=sessions.c.parent_session_id.is_not(None),
    postgresql_where=sessions.c.parent_session_id.is_not(None),
)
Index(
    "uq_sessions_name",
    sessions.c.run_id,
    sessions.c.name,
    unique=True,
    sqlite_where=sessions.c.name.is_not(None),
    postgresql_where=sessions.c.name.is_not(None),
)
Index(
    "ix_sessions_root",
    sessions.c.root_session_id,
    sessions.c.depth,
    sessions.c.id,
    sqlite_where=sessions.c.root_session_id.is_not(None),
    postgresql_where=sessions.c.root_session_id.is_not(None),
)

unsent_traces = Table(  # built sessions of a run with `metrics.traces` whose spans were not sent yet
    "unsent_traces",
    metadata,
    Column("session_id", ForeignKey("sessions.id"), primary_key=True),
    Column("run_id", ForeignKey("runs.id"), nullable=False),
    Column("due_at", Float, nullable=False),  # by the database's clock: until then one sender has claimed it
    Index("ix_unsent_traces_due", "run_id", "due_at", "session_id"),
)

contents = Table(  # JSON that many calls share (tools, system messages), by content hash
    "contents",
    metadata,
    Column("hash", String(64), primary_key=True),
    Column("body", LargeBinary, nullable=False),
)

interactions = Table(
    "interactions",
    metadata,
    Column("id", Id, primary_key=True),  # also the engine's rid and the completion id
    Column("run_id", ForeignKey("runs.id"), nullable=False),
    Column("session_id", ForeignKey("sessions.id"), nullable=False, index=True),
    Column("parent_id", ForeignKey("interactions.id")),
    Column("seq", Integer),  # the session's sequence number at its commit
    Column("dialect", String(32), nullable=False),
    Column("status", String(16), nullable=False),
    Column("role", String(16), nullable=False),
    Column("digest", String(64), nullable=False),  # of the request body: finds retries
    Column("request_id", Id),  # the first call of a request with several calls; null for a single call
    Column("repeat_key", String(64)),  # hash of the request's Idempotency-Key
    Column("replica", String(64), nullable=False),  # the replica that samples it
    # Whether a client received the answer (schemas.Delivery), and the replica where a client waits for it.
    Column("delivery", String(16), nullable=False, default="given"),
    Column("holder", String(64)),
    Column("last_retry", Integer),  # number of the retry that got the answer last; null: none
    Column("engine_url", Text),  # of the engine that sampled its last token
    Column("engine_backend", String(32)),
    Column("engine_spans", JSON),  # where several engines sampled it: [[url, backend, first token], …]
    Column("params", JSON, nullable=False),
    Column("temperature", Float, nullable=False),
    Column("system_hash", ForeignKey("contents.hash")),  # the system messages that the conversation begins with
    Column("tools_hash", ForeignKey("contents.hash")),
    Column("options", JSON),  # other options: tool_choice, the choice of n, … (null: none)
    Column("messages", Integer, nullable=False, default=0),  # of the conversation, the answer included
    Column("conversation_key", String(64)),  # chained hash of the messages, this answer included
    Column("textless_key", String(64)),  # the same without the answer's text, for clients that drop it; mostly null
    Column("fork_reason", String(32)),
    Column("bridged", Boolean, nullable=False, default=False),
    Column("distribution_modified", Boolean, nullable=False),
    Column("kv_mixed", Boolean, nullable=False, default=False),
    Column("trainable", Boolean, nullable=False),
    Column("prompt_tokens", Integer, nullable=False),
    Column("prompt_digest", String(32), nullable=False),  # of the ids that the engine got: checks every bridge
    Column("output_tokens", Integer, nullable=False, default=0),
    Column("upstream_tokens", Integer, nullable=False, server_default="0"),  # sampled by another model, as it reports
    Column("cached_tokens", Integer),
    Column("min_version", Integer),
    Column("max_version", Integer),
    Column("finish_reason", String(32)),
    Column("error", Text),
    Column("created_at", Float, nullable=False),
    Column("first_token_at", Float),
    Column("finished_at", Float),
    _one_of("status", "running", "complete", "aborted", "lost", "failed"),
    _one_of("delivery", "open", "given", "free", "unsure"),
)
Index(
    "ix_interactions_running",
    interactions.c.replica,
    sqlite_where=interactions.c.status == "running",
    postgresql_where=interactions.c.status == "running",
)
Index(
    "ix_interactions_open",
    interactions.c.holder,
    sqlite_where=interactions.c.delivery == "open",
    postgresql_where=interactions.c.delivery == "open",
)

interaction_data = Table(
    "interaction_data",
    metadata,
    Column("interaction_id", ForeignKey("interactions.id"), primary_key=True),
    Column("new_messages", LargeBinary, nullable=False),  # those after the parent's (or the system's); zstd JSON
    Column("answer", LargeBinary, nullable=False),  # the delivered message; zstd JSON
    Column("prompt_delta_ids", LargeBinary, nullable=False),  # int32, follows the parent's prompt + output
    Column("output_ids", LargeBinary, nullable=False),  # int32
    Column("logprobs", LargeBinary, nullable=False),  # float32, one per output id
    Column("spans", JSON, nullable=False),  # [[version, start, end], …] over the output ids
    Column("top_logprobs", LargeBinary),  # see likeliest_codec; null unless asked for
)

routed_experts = Table(  # of calls for which the run records them (`trainer.routing_replay`)
    "routed_experts",
    metadata,
    Column("interaction_id", ForeignKey("interactions.id"), primary_key=True),
    Column("start", Integer, nullable=False),  # the first of the call's positions
    Column("computed_from", Integer, nullable=False),  # positions before `start` that the call's passes computed again
    Column("recorded", Integer, nullable=False),  # how many positions have each RouteOrigin
    Column("recomputed", Integer, nullable=False),
    Column("missing", Integer, nullable=False),
    Column("data", LargeBinary, nullable=False),  # see experts_codec
)

rewards = Table(  # append-only facts; the newest of a (session, interaction, scope, name) counts
    "rewards",
    metadata,
    Column("id", Id, primary_key=True),
    Column("run_id", ForeignKey("runs.id"), nullable=False),
    Column("session_id", ForeignKey("sessions.id"), nullable=False, index=True),
    Column("interaction_id", ForeignKey("interactions.id")),  # null for a reward of the session
    Column("scope", String(16), nullable=False),  # the calls whose returns it changes: credit.py
    Column("name", String(100), nullable=False),
    Column("value", Float, nullable=False),
    Column("source", String(100), nullable=False),
    Column("idempotency_key", String(200)),
    Column("applied", Boolean, nullable=False),
    Column("created_at", Float, nullable=False),
    UniqueConstraint("session_id", "idempotency_key"),
    _one_of("scope", "session", "branch", "call"),
)

trajectories = Table(
    "trajectories",
    metadata,
    Column("id", Id, primary_key=True),
    Column("run_id", ForeignKey("runs.id"), nullable=False),
    Column("group_id", ForeignKey("groups.id"), nullable=False, index=True),
    Column("session_id", ForeignKey("sessions.id"), nullable=False, index=True),
    Column("leaf_id", ForeignKey("interactions.id"), nullable=False),
    Column("tokens", Integer, nullable=False),
    Column("trainable_tokens", Integer, nullable=False),
    Column("min_version", Integer),
    Column("max_version", Integer),
    Column("return", Float),  # the return of its episode, from the applied rewards
    Column("state", String(16), nullable=False),
    Column("reason", String(100)),  # why it is stale or rejected
    Column("lease_epoch", Integer),
    Column("lease_step_id", ForeignKey("steps.id"), index=True),
    Column("created_at", Float, nullable=False),
    _one_of("state", "ready", "leased", "trained", "stale", "rejected"),
)

# Holds all that `sample_flow` reads, and pages of one state and reason, newest first.
Index(
    "ix_trajectories_untrained",
    trajectories.c.run_id,
    trajectories.c.state,
    trajectories.c.reason,
    trajectories.c.id,
    trajectories.c.trainable_tokens,
    sqlite_where=trajectories.c.state != "trained",
    postgresql_where=trajectories.c.state != "trained",
)

trajectory_interactions = Table(
    "trajectory_interactions",
    metadata,
    Column("trajectory_id", ForeignKey("trajectories.id"), primary_key=True),
    Column("position", Integer, primary_key=True, autoincrement=False),
    Column("interaction_id", ForeignKey("interactions.id"), nullable=False, index=True),
    Column("owned", Boolean, nullable=False),  # false: another trajectory trains this output
)

steps = Table(
    "steps",
    metadata,
    Column("id", Id, primary_key=True),
    Column("run_id", ForeignKey("runs.id"), nullable=False, index=True),
    Column("epoch", Integer, nullable=False),
    Column("step", Integer, nullable=False),
    Column("state", String(16), nullable=False),
    Column("version_before", Integer, nullable=False),
    Column("version_after", Integer),
    # The batch's settings and digest: a replay is compared with them.
    Column("max_staleness", Integer, nullable=False),
    Column("turn_discount", Float, nullable=False),
    Column("reward_scaling", JSON),  # `RewardScaling`; null: rewards are trained as they are recorded
    Column("estimator", String(32)),
    Column("batch_digest", String(32)),
    # Totals of the trained batch, so that a dashboard reads one row per step.
    Column("groups", Integer, nullable=False, default=0),
    Column("trajectories", Integer, nullable=False, default=0),
    Column("tokens_trained", Integer, nullable=False, default=0),
    Column("wasted_tokens", Integer, nullable=False, default=0),
    Column("staleness_max", Integer),
    Column("return_mean", Float),
    Column("metrics", JSON, nullable=False),
    Column("started_at", Float, nullable=False),
    Column("trained_at", Float),
    Column("published_at", Float),
    _one_of("state", "started", "trained", "published", "rolled_back"),
)
Index(
    "uq_steps_surviving",
    steps.c.run_id,
    steps.c.step,
    unique=True,
    sqlite_where=steps.c.state != "rolled_back",
    postgresql_where=steps.c.state != "rolled_back",
)

checkpoints = Table(  # the durable checkpoint of a step; the row outlives the folder
    "checkpoints",
    metadata,
    Column("step_id", ForeignKey("steps.id"), primary_key=True),
    Column("digest", String(64), nullable=False),  # SHA-256 of its meta.json, which has those of its other files
    Column("size_bytes", BigInteger, nullable=False),
    Column("written_at", Float, nullable=False),  # complete in the run's folder
    Column("stored_at", Float),  # complete in object storage; null: not
)

step_trajectories = Table(
    "step_trajectories",
    metadata,
    Column("step_id", ForeignKey("steps.id"), primary_key=True),
    Column("trajectory_id", ForeignKey("trajectories.id"), primary_key=True, index=True),
    Column("advantage", Float, nullable=False),
    Column("staleness_max", Integer, nullable=False),
    Column("staleness_mean", Float, nullable=False),
    Column("tokens_trained", Integer, nullable=False),
)

replays = Table(  # trajectories of groups that a later step than the one of their lease trains once more
    "replays",
    metadata,
    Column("step_id", ForeignKey("steps.id"), primary_key=True),
    Column("trajectory_id", ForeignKey("trajectories.id"), primary_key=True, index=True),
    Column("stale", Boolean, nullable=False),  # too old at this step: its reward stays in the baseline
)

token_facts = Table(
    "token_facts",
    metadata,
    Column("step_id", ForeignKey("steps.id"), primary_key=True),
    Column("trajectory_id", ForeignKey("trajectories.id"), primary_key=True, index=True),
    Column("tokens", Integer, nullable=False),  # loss tokens: columns of the first table in `data`
    Column("facts", Integer, nullable=False, server_default="9"),  # its rows: the first of domain.schemas.FACTS
    Column("data", LargeBinary, nullable=False),  # the tables of domain.schemas.TokenFacts, the second one may be empty
)

teacher_logprobs = Table(  # of teachers that are servers, which are asked once
    "teacher_logprobs",
    metadata,
    Column("trajectory_id", ForeignKey("trajectories.id"), primary_key=True),
    Column("teacher", String(1000), primary_key=True),  # as `trainer.teacher` names it
    Column("tokens", Integer, nullable=False),  # sampled tokens of the trajectory
    Column("data", LargeBinary, nullable=False),  # float32, one for each of them
)

engines = Table(
    "engines",
    metadata,
    Column("run_id", ForeignKey("runs.id"), primary_key=True),
    Column("url", String(300), primary_key=True),
    Column("state", String(16), nullable=False),
    Column("version", Integer),
    Column("error", Text),
    Column("last_seen_at", Float, nullable=False),
    Column("draining", Boolean, nullable=False, server_default=false()),  # takes no calls
    Column("updater", String(100)),  # the replica that may change its weights
    Column("updating_until", Float),  # after that, another replica may
    Column("leased_until", Float),  # of an engine that joined by itself
    Column("own_key", Boolean, nullable=False, server_default=false()),  # it requires a key of its own
    Column("backend", String(32)),  # of its server; null: the run's, of an engine that no replica has seen yet
    # What replicas read each second: rows that changed. The time is the database's.
    Column("changes", Integer, nullable=False, server_default="0"),  # grows with every change
    Column("changed_at", Float, nullable=False, server_default="0"),
    Column("seen_by", String(100)),  # the replica that saw the state
    Column("starting_until", Float),  # its process may take GPU memory until it answers or ends, or until then
    _one_of("state", "serving", "updating", "released", "dead"),
    Index("ix_engines_changed", "run_id", "changed_at"),
)

memory_leases = Table(  # the trainer's turn on the GPUs that it shares with engines, which release their memory
    "memory_leases",
    metadata,
    Column("run_id", ForeignKey("runs.id"), primary_key=True),
    Column("epoch", Integer, nullable=False),  # of the trainer
    Column("until", Float, nullable=False),  # by the database's clock
    Column("version", Integer),  # that the trainer publishes: its turn is over, and engines load this version
)

heartbeats = Table(  # one row per participant; one that is silent for too long counts as dead
    "heartbeats",
    metadata,
    Column("run_id", ForeignKey("runs.id"), primary_key=True),
    Column("kind", String(16), primary_key=True),
    Column("name", String(100), primary_key=True),
    Column("started_at", Float, nullable=False),
    Column("last_seen_at", Float, nullable=False),
    Column("about", JSON),  # its host, and what it does
    _one_of("kind", "proxy", "worker"),
)

parts = Table(  # the parts of a run that a scheduler places: what is wanted, whatever runs at the moment
    "parts",
    metadata,
    Column("run_id", ForeignKey("runs.id"), primary_key=True),
    Column("name", String(100), primary_key=True),
    Column("spec", JSON, nullable=False),
    Column("wanted", String(16), nullable=False),
    Column("attempt", Integer, nullable=False),  # of a gang: all of its ranks work on one attempt
    Column("deaths", JSON, nullable=False),  # times of the last deaths, for the restart limit
    Column("failure", Text),  # why the part was given up
    _one_of("wanted", "running", "stopped"),
)

part_ranks = Table(  # one row per process of a part, owned by the task runner that holds its lease
    "part_ranks",
    metadata,
    Column("run_id", ForeignKey("runs.id"), primary_key=True),
    Column("part", String(100), primary_key=True),
    Column("rank", Integer, primary_key=True),
    Column("runner", Id, nullable=False),
    Column("host", String(255), nullable=False),
    Column("address", String(255), nullable=False),
    Column("state", String(16), nullable=False),
    Column("attempt", Integer),  # that the rank has announced its ports for
    Column("ports", JSON, nullable=False),
    Column("pid", Integer),
    Column("status", Integer),  # exit status
    Column("starts", Integer, nullable=False),
    Column("claimed_at", Float, nullable=False),
    Column("leased_until", Float, nullable=False),
    _one_of("state", "waiting", "running", "ended"),
)

events = Table(
    "events",
    metadata,
    Column("id", Id, primary_key=True),
    Column("run_id", ForeignKey("runs.id"), nullable=False),
    Column("kind", String(50), nullable=False),
    Column("source", String(100), nullable=False),
    Column("data", JSON, nullable=False),
    Column("created_at", Float, nullable=False),
    Index("ix_events_run_id_kind", "run_id", "kind", "id"),
)

keys = Table(  # a row overrides `runs.key_hash` or `sessions.key_hash` of the same hash
    "keys",
    metadata,
    Column("id", Id, primary_key=True),
    Column("run_id", ForeignKey("runs.id"), nullable=False),
    Column("session_id", ForeignKey("sessions.id"), index=True),
    Column("power", String(16), nullable=False),
    Column("name", String(100), nullable=False),
    Column("key_hash", String(64), nullable=False),
    Column("created_at", Float, nullable=False),
    Column("changed_at", Float, nullable=False),
    Column("expires_at", Float),
    Column("revoked_at", Float),
    _one_of("power", "admin", "run", "session"),
)
Index("uq_keys_hash", keys.c.run_id, keys.c.key_hash, unique=True)
Index("ix_keys_changed", keys.c.run_id, keys.c.changed_at)

LINEAGE_VIEW = """
CREATE VIEW lineage AS
SELECT s.run_id, s.step, s.state AS step_state, s.version_before, s.version_after,
       t.id AS trajectory_id, t.group_id, t.session_id, t."return", st.advantage, st.staleness_max, st.staleness_mean,
       st.tokens_trained, ti.position, ti.owned, i.id AS interaction_id, i.status AS interaction_status, i.min_version,
       i.max_version, i.prompt_tokens, i.output_tokens, i.finish_reason, i.fork_reason
FROM steps s
JOIN step_trajectories st ON st.step_id = s.id
JOIN trajectories t ON t.id = st.trajectory_id
JOIN trajectory_interactions ti ON ti.trajectory_id = t.id
JOIN interactions i ON i.id = ti.interaction_id
"""
"""The view that joins a step to the calls that it trained: one row per step, trajectory and call."""
