"""The revisions, and a row of each table at the oldest one, written and read back at any revision."""

from __future__ import annotations

from typing import Any

from alembic.script import ScriptDirectory
from sqlalchemy import Connection, MetaData

from agentrl.store.db.revisions import alembic_config
from agentrl.store.tables import metadata

REVISIONS = [script.revision for script in ScriptDirectory.from_config(alembic_config()).walk_revisions()][::-1]
OLDEST, NEWEST = REVISIONS[0], REVISIONS[-1]
ID = {
    name: name[:8].ljust(32, "0")
    for name in ("run", "task", "group", "session", "call", "reward", "trajectory", "step")
}
ROWS: dict[str, dict[str, Any]] = {  # of the oldest revision
    "contents": {"hash": "c" * 64, "body": b"[]"},
    "runs": {
        "id": ID["run"],
        "name": "r",
        "config": {"trainer": {"max_staleness": 4}, "a": [1]},
        "base_model": "tiny",
        "status": "running",
        "error": None,
        "key_hash": "k" * 64,
        "seed": 2**40,
        "target_steps": 3,
        "current_version": 1,
        "published_step": 1,
        "trainer_epoch": 2,
        "data_cursor": 1,
        "admitted": 1,
        "returned": 0,
        "running": 0,
        "created_at": 1.5,
        "finished_at": None,
    },
    "tasks": {"id": ID["task"], "run_id": ID["run"], "position": 0, "data": {"n": 1}},
    "groups": {
        "id": ID["group"],
        "run_id": ID["run"],
        "task_id": ID["task"],
        "cursor": 0,
        "task": None,
        "size": 1,
        "is_eval": False,
        "external": False,
        "state": "trained",
        "sampling": None,
        "owner": "w",
        "created_at": 2.0,
        "finished_at": 3.0,
    },
    "sessions": {
        "id": ID["session"],
        "run_id": ID["run"],
        "group_id": ID["group"],
        "sample_index": 0,
        "key_hash": "s" * 64,
        "status": "completed",
        "seq": 1,
        "is_eval": False,
        "built": True,
        "metadata": {},
        "error": None,
        "parent_session_id": None,
        "created_at": 2.0,
        "last_seen_at": 2.5,
        "ended_at": 3.0,
    },
    "interactions": {
        "id": ID["call"],
        "run_id": ID["run"],
        "session_id": ID["session"],
        "parent_id": None,
        "seq": 1,
        "dialect": "openai_chat",
        "status": "complete",
        "role": "main",
        "digest": "d" * 64,
        "replica": "p",
        "engine_url": "u",
        "params": {},
        "temperature": 1.0,
        "tools_hash": "c" * 64,
        "conversation_key": "e" * 64,
        "fork_reason": None,
        "bridged": False,
        "distribution_modified": False,
        "kv_mixed": False,
        "trainable": True,
        "prompt_tokens": 2,
        "prompt_digest": "f" * 32,
        "output_tokens": 1,
        "cached_tokens": 0,
        "min_version": 0,
        "max_version": 0,
        "finish_reason": "stop",
        "error": None,
        "created_at": 2.1,
        "first_token_at": 2.2,
        "finished_at": 2.3,
    },
    "interaction_data": {
        "interaction_id": ID["call"],
        "new_messages": b"m",
        "answer": b"a",
        "prompt_delta_ids": b"12345678",
        "output_ids": b"1234",
        "logprobs": b"\0\0\0\0",
        "spans": [[0, 0, 1]],
    },
    "rewards": {
        "id": ID["reward"],
        "run_id": ID["run"],
        "session_id": ID["session"],
        "interaction_id": ID["call"],
        "name": "reward",
        "value": 0.5,
        "source": "agent",
        "idempotency_key": "i",
        "applied": True,
        "created_at": 2.4,
    },
    "steps": {
        "id": ID["step"],
        "run_id": ID["run"],
        "epoch": 2,
        "step": 1,
        "state": "published",
        "version_before": 0,
        "version_after": 1,
        "wasted_tokens": 0,
        "metrics": {"loss": 0.1},
        "started_at": 4.0,
        "trained_at": 5.0,
        "published_at": 6.0,
    },
    "trajectories": {
        "id": ID["trajectory"],
        "run_id": ID["run"],
        "group_id": ID["group"],
        "session_id": ID["session"],
        "leaf_id": ID["call"],
        "tokens": 3,
        "trainable_tokens": 1,
        "min_version": 0,
        "max_version": 0,
        "return": 0.5,
        "state": "trained",
        "reason": None,
        "lease_epoch": 2,
        "lease_step_id": ID["step"],
        "created_at": 3.0,
    },
    "trajectory_interactions": {
        "trajectory_id": ID["trajectory"],
        "position": 0,
        "interaction_id": ID["call"],
        "owned": True,
    },
    "step_trajectories": {
        "step_id": ID["step"],
        "trajectory_id": ID["trajectory"],
        "advantage": 0.0,
        "staleness_max": 0,
        "staleness_mean": 0.0,
        "tokens_trained": 1,
    },
    "weight_versions": {
        "run_id": ID["run"],
        "version": 1,
        "parent_version": 0,
        "step": 1,
        "path": "p",
        "checksum": "c" * 64,
        "state": "published",
        "created_at": 5.0,
        "published_at": 6.0,
    },
    "engines": {
        "run_id": ID["run"],
        "url": "http://e",
        "state": "serving",
        "version": 1,
        "error": None,
        "last_seen_at": 7.0,
    },
    "events": {"id": "e" * 32, "run_id": ID["run"], "kind": "k", "source": "s", "data": {"a": 1}, "created_at": 7.0},
}


def fill(conn: Connection) -> None:
    reflected = reflect(conn)
    for name, row in ROWS.items():
        conn.execute(reflected.tables[name].insert().values(row))


def reflect(conn: Connection) -> MetaData:
    """The tables as they are; JSON columns typed as declared, since SQLite does not tell them from text."""
    reflected = MetaData()
    reflected.reflect(conn)
    for table in reflected.tables.values():
        for column in table.columns:
            if table.name in metadata.tables and column.name in metadata.tables[table.name].columns:
                column.type = metadata.tables[table.name].columns[column.name].type
    return reflected


def kept(conn: Connection) -> dict[str, list[dict[str, Any]]]:
    """The rows of the tables that were filled, in the columns that were filled."""
    reflected = reflect(conn)
    return {
        name: [
            dict(r)
            for r in conn.execute(
                reflected.tables[name]
                .select()
                .with_only_columns(*(reflected.tables[name].columns[column] for column in row))
            ).mappings()
        ]
        for name, row in ROWS.items()
    }
