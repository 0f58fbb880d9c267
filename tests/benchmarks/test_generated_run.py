"""The generated run of the dashboard's benchmark: the audit finds no fault in it, and its seed decides its rows."""

from __future__ import annotations

from dashboards import run_parts
from dashboards.generated_run import CONFIG, chunks, generate
from sqlalchemy import func, select

from agentrl.configs.run_config import RunConfig
from agentrl.domain.schemas import Power
from agentrl.store import Database, key_records, sample_flow
from agentrl.store.audit import run_audit
from agentrl.store.db import codec
from agentrl.store.tables import interactions, sessions

NOW = 1_790_000_000.0


def filled(db: Database) -> str:
    return generate(db, calls=1_500, trajectories=200, tasks=50, now=NOW)


def test_the_audit_finds_no_fault(db: Database) -> None:
    run_id = filled(db)
    with db.read() as conn:
        assert list(run_audit.scan(conn, run_id)) == []
        bands = {band["band"] for band in sample_flow.of_run(conn, run_id)["bands"]}
        statuses = set(conn.execute(select(sessions.c.status).distinct()).scalars())
        calls = conn.execute(select(func.count()).select_from(interactions)).scalar_one()
        key = key_records.find(conn, run_id, codec.hash_key(run_parts.ADMIN_KEY))
    assert db.integrity() == []
    assert bands == {"trained", "waiting", "stale", "rejected", "open", "without calls"}
    assert {"open", "completed", "failed"} <= statuses
    assert 1_300 < calls < 1_700
    assert key is not None
    assert key.power is Power.ADMIN


def first_calls(seed: int) -> list[str]:
    _, _, tables = next(chunks(600, 80, 20, seed, NOW))
    return [row["id"] for row in tables["interactions"]]


def test_the_seed_decides_the_rows() -> None:
    assert first_calls(0) == first_calls(0)
    assert first_calls(0) != first_calls(1)


def test_its_config_is_one_of_a_run() -> None:
    config = RunConfig(**CONFIG)
    assert config.rollout.group_size == 8
