"""The migrations build exactly what tables.py says, step by step in both directions, once, and keep the rows."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, Inspector, MetaData, inspect, make_url, text

from agentrl.store import Database
from agentrl.store.db import sqlite_file
from agentrl.store.db.revisions import alembic_config
from agentrl.store.tables import metadata

REVISIONS = [script.revision for script in ScriptDirectory.from_config(alembic_config()).walk_revisions()][::-1]
OLDEST, NEWEST = REVISIONS[0], REVISIONS[-1]


@pytest.fixture
def empty(empty_database_url):
    database = Database(empty_database_url)
    yield database
    database.close()


def schema(conn: Connection) -> dict[str, Any]:
    """Everything that the database tells about its tables; no order of columns, which ALTER TABLE cannot keep."""
    inspector = inspect(conn)
    told: dict[str, Any] = {f"view {name}": inspector.get_view_definition(name) for name in inspector.get_view_names()}
    for table in inspector.get_table_names():
        told[table] = {
            "columns": {c["name"]: (repr(c["type"]), c["nullable"]) for c in inspector.get_columns(table)},
            "primary key": inspector.get_pk_constraint(table),
            "foreign keys": foreign_keys(inspector, table),
            "unique": by_name(inspector.get_unique_constraints(table)),
            "checks": by_name(inspector.get_check_constraints(table)),
            "indexes": by_name(inspector.get_indexes(table)),
        }
    return told


def foreign_keys(inspector: Inspector, table: str) -> list[dict[str, Any]]:
    """By column: SQLAlchemy reads no names of those that SQLite's ALTER TABLE adds."""
    named = inspector.bind.dialect.name != "sqlite"
    found = [{**key, "name": key["name"] if named else None} for key in inspector.get_foreign_keys(table)]
    return sorted(found, key=lambda key: key["constrained_columns"])


def by_name(items: list[Any]) -> list[dict[str, Any]]:
    predicates = [{k: str(v) for k, v in item.get("dialect_options", {}).items()} for item in items]
    plain = [{**item, "dialect_options": options} for item, options in zip(items, predicates, strict=True)]
    return sorted(plain, key=lambda item: str(item["name"]))


def tables_of(told: dict[str, Any]) -> dict[str, Any]:
    return {name: what for name, what in told.items() if name != "alembic_version" and not name.startswith("view ")}


def test_autogenerate_finds_no_difference(db: Database):
    with db.read() as conn:
        assert compare_metadata(MigrationContext.configure(conn), metadata) == []


def test_the_migrated_schema_is_the_declared_one(db: Database, databases, database_kind):
    """Autogenerate looks neither at CHECK constraints nor at the predicates of partial indexes."""
    with databases.lent(database_kind, migrated=False) as url:
        declared = Database(url)
        if declared.is_sqlite:
            sqlite_file.create(Path(str(make_url(url).database)))
        with declared.write() as conn:
            metadata.create_all(conn)
        want = declared.query(schema)
        declared.close()
    have = tables_of(db.query(schema))
    assert have.keys() == want.keys()
    for table in want:
        assert have[table] == want[table], table
    assert any(table["checks"] for table in want.values())
    assert any("where" in str(index) for table in want.values() for index in table["indexes"])


def test_the_lineage_view_can_be_queried(db: Database):
    assert db.query(lambda conn: conn.execute(text("SELECT * FROM lineage")).all()) == []


def test_every_revision_upgrades_and_downgrades(empty: Database):
    at: dict[str, dict[str, Any]] = {}
    for revision in REVISIONS:
        empty.upgrade(revision)
        at[revision] = empty.query(schema)
    for revision in REVISIONS[::-1]:
        assert empty.query(schema) == at[revision]
        below = REVISIONS[REVISIONS.index(revision) - 1] if revision != OLDEST else "base"
        empty.downgrade(below)
    assert tables_of(empty.query(schema)) == {}
    assert not [name for name in empty.query(schema) if name.startswith("view ")]
    empty.upgrade()
    assert empty.query(schema) == at[NEWEST]
    empty.require_current()


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


def test_rows_of_the_oldest_revision_survive_the_way_up_and_down(empty: Database):
    want = {name: [row] for name, row in ROWS.items()}
    empty.upgrade(OLDEST)
    empty.transact(fill)
    assert set(ROWS) | {"alembic_version"} == set(empty.query(lambda conn: inspect(conn).get_table_names()))
    for revision in REVISIONS[1:]:
        empty.upgrade(revision)
        assert empty.query(kept) == want, revision
        assert empty.integrity() == []
    for revision in REVISIONS[-2::-1]:
        empty.downgrade(revision)
        assert empty.query(kept) == want, revision
        assert empty.integrity() == []


def test_steps_of_the_first_revision_get_the_settings_that_their_batches_were_made_with(empty: Database):
    empty.upgrade("0001")
    empty.transact(fill)
    empty.upgrade("0002")
    (step,) = empty.query(lambda conn: conn.execute(text("SELECT * FROM steps")).all())
    assert (step.max_staleness, step.turn_discount, step.trajectories, step.tokens_trained) == (4, 1.0, 1, 1)


def test_sub_agents_of_the_first_revision_get_their_roots_however_deep_they_stand(empty: Database):
    empty.upgrade("0001")
    empty.transact(fill)
    levels = 1050

    def grow(conn: Connection) -> None:
        sessions = reflect(conn).tables["sessions"]
        ids = [ID["session"], *(f"{i:032d}" for i in range(1, levels + 1))]
        rows = [
            {**ROWS["sessions"], "id": ids[i], "parent_session_id": ids[i - 1], "sample_index": i, "key_hash": ids[i]}
            for i in range(1, levels + 1)
        ]
        conn.execute(sessions.insert(), rows)

    empty.transact(grow)
    empty.upgrade()
    found = empty.query(lambda conn: conn.execute(text("SELECT * FROM sessions ORDER BY depth")).all())
    assert [row.depth for row in found] == list(range(levels + 1))
    assert {row.root_session_id for row in found} == {None, ID["session"]}
    assert found[0].root_session_id is None
    assert [row.parent_session_id for row in found[1:]] == [row.id for row in found[:-1]]
    assert empty.integrity() == []


def test_a_downgrade_rejects_the_groups_that_wait_for_sessions_in_vain(empty: Database):
    """One waits and all of its sessions have ended, one waits and still runs, one has given its places up."""
    empty.upgrade("0020")

    def grow(conn: Connection) -> None:
        tables = reflect(conn).tables
        conn.execute(tables["runs"].insert().values(ROWS["runs"] | {"admitted": 3, "running": 2}))
        group = {"run_id": ID["run"], "size": 4, "is_eval": False, "external": True, "created_at": 1.0}
        for i, (state, due_at, missing) in enumerate([("running", 9.0, 0), ("running", 9.0, 0), ("ready", None, 3)]):
            more = {"id": str(i), "name": str(i), "state": state, "due_at": due_at, "missing": missing}
            conn.execute(tables["groups"].insert().values(group | more))
            session = ROWS["sessions"] | {"id": str(i), "group_id": str(i), "key_hash": str(i), "depth": 0}
            later = {"built": i != 1, "due_at": 9.0, "last_seen_at": 1.0}
            conn.execute(tables["sessions"].insert().values({**session, **later}))

    empty.transact(grow)
    empty.downgrade("0019")
    found = empty.query(lambda conn: conn.execute(text("SELECT * FROM groups ORDER BY id")).all())
    why = "not filled before a downgrade"
    assert [(row.state, row.size, row.reject_reason, row.finished_at) for row in found] == [
        ("rejected", 1, why, 9.0),
        ("running", 1, None, None),
        ("ready", 1, None, None),
    ]
    (run,) = empty.query(lambda conn: conn.execute(text("SELECT * FROM runs")).all())
    assert (run.admitted, run.running, run.returned) == (3, 1, 1)
    assert empty.integrity() == []


STARTER = """
import sys
from sqlalchemy import event
from agentrl.store import Database
from agentrl.store.db import sqlite_file
url = sys.argv[1]
print("ready", flush=True)
sys.stdin.readline()
db = Database(url)
made = []
event.listen(db.engine, "before_cursor_execute", lambda *a: made.append(a[2]) if "CREATE TABLE" in a[2] else None)
db.upgrade()
db.require_current()
print(sum("runs" in statement.split("(")[0] for statement in made), flush=True)
"""


def test_processes_that_start_together_migrate_once(empty_database_url: str):
    started = [
        subprocess.Popen(
            [sys.executable, "-c", STARTER, empty_database_url],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(6)
    ]
    for process in started:
        assert process.stdout.readline() == "ready\n"
    for process in started:
        process.stdin.write("go\n")
        process.stdin.flush()
    told = [process.communicate(timeout=120) for process in started]
    assert [process.returncode for process in started] == [0] * 6, [error for _, error in told]
    assert sum(int(output) for output, _ in told) == 1
