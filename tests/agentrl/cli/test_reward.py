"""A person rewards from the command line: at once or late, with the run's own limits."""

from __future__ import annotations

import json
from typing import Any

import pytest
from run_records import create_run
from sqlalchemy import select
from typer.testing import CliRunner

from agentrl.cli.main import app
from agentrl.domain.schemas import SessionStatus
from agentrl.errors import RequestError
from agentrl.store import Database
from agentrl.store.sessions import group_starts, session_limits
from agentrl.store.sessions.ends import sealing
from agentrl.store.tables import groups
from agentrl.store.tables import sessions as sessions_table
from agentrl.store.training import rewards

CONFIG = {
    "name": "test",
    "model": "tiny",
    "agent": "a:B",
    "tasks": "t.jsonl",
    "rollout": {"group_size": 1, "min_group_size": 1},
    "proxy": {"reward_timeout_s": 3600.0},
}


@pytest.fixture
def session_id(db: Database) -> str:
    """A session that ended without a reward, and waits for one."""
    from agentrl.configs.config_files import parse_config

    limits = session_limits.Limits.of(parse_config(CONFIG))
    with db.write() as conn:
        run_id = create_run(conn, config=CONFIG, key="k")
        (made,) = group_starts.start_group(conn, run_id, limits, ["hash"]).session_ids
        sealing.end(conn, made, SessionStatus.COMPLETED, None, limits)
    return made


def reward(db: Database, session_id: str, *options: str) -> Any:
    result = CliRunner().invoke(
        app,
        ["store", "reward", "--session", session_id, "--database-url", db.url, *options],
        catch_exceptions=False,
    )
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def built(db: Database, session_id: str) -> bool:
    with db.read() as conn:
        return bool(conn.execute(select(sessions_table.c.built).where(sessions_table.c.id == session_id)).scalar_one())


def test_a_late_judgement_is_applied_and_ends_the_wait(db: Database, session_id: str) -> None:
    assert not built(db, session_id)
    assert reward(db, session_id, "--value", "0.5", "--name", "style")["applied"]
    assert built(db, session_id)
    with db.read() as conn:
        (fact,) = rewards.history(conn, session_id)
    assert (fact["value"], fact["name"], fact["source"], fact["scope"]) == (0.5, "style", "human", "session")


def test_a_judgement_that_came_too_late_is_kept_and_says_so(db: Database, session_id: str) -> None:
    with db.write() as conn:
        conn.execute(groups.update().values(state="trained"))
    assert reward(db, session_id, "--value", "1")["applied"] is False
    with db.read() as conn:
        assert [fact["applied"] for fact in rewards.history(conn, session_id)] == [False]


def test_a_repeated_key_counts_once(db: Database, session_id: str) -> None:
    first = reward(db, session_id, "--value", "1", "--key", "k")
    assert reward(db, session_id, "--value", "0", "--key", "k") == first
    with db.read() as conn:
        assert [fact["value"] for fact in rewards.history(conn, session_id)] == [1.0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--value", "nan"], "finite"),
        (["--value", "1", "--scope", "branch"], "needs an interaction_id"),
        (["--value", "1", "--call", "chatcmpl-none"], "has no call 'none'"),
        (["--value", "1", "--session", "nobody"], "no session 'nobody'"),
    ],
)
def test_an_invalid_reward_is_refused_with_its_reason(
    db: Database, session_id: str, options: list[str], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        reward(db, session_id, *options)
