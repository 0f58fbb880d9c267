"""Keys from the command line: printed once, listed without themselves."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator

import pytest
from run_records import create_run
from typer.testing import CliRunner

from agentrl.cli.main import app
from agentrl.domain.schemas import Power
from agentrl.errors import AgentRLError, UserError
from agentrl.store import Database, key_records, runs
from agentrl.store.db.codec import hash_key

Run = Callable[..., str]


@pytest.fixture
def db(database_url: str) -> Iterator[Database]:
    database = Database(database_url)
    with database.write() as conn:
        create_run(conn, key="k")
    yield database
    database.close()


@pytest.fixture
def key(db: Database) -> Run:
    def run(*args: str) -> str:
        result = CliRunner().invoke(
            app, ["key", *args, "--run", "test", "--database-url", db.url], catch_exceptions=False
        )
        assert result.exit_code == 0, result.output
        return result.stdout.strip()

    return run


def opens(db: Database, made: str) -> key_records.Key | None:
    return db.query(key_records.find, db.query(runs.by_name, "test").id, hash_key(made))


def test_a_key_is_printed_once_and_never_listed(db: Database, key: Run) -> None:
    made = key("create", "--name", "ci", "--expires-in", "7d")
    assert re.fullmatch(r"arl-run-[A-Za-z0-9_-]{32}", made)
    found = opens(db, made)
    assert found is not None
    assert found.power is Power.RUN
    listed = key("list")
    assert made not in listed
    assert hash_key(made) not in listed
    (_, ci) = json.loads(listed)
    assert ci["name"] == "ci"
    assert abs(ci["expires_at"] - ci["created_at"] - 7 * 86400) < 60
    assert key("create", "--name", "ops", "--power", "admin").startswith("arl-admin-")


def test_a_rotated_key_lives_on_for_its_overlap(db: Database, key: Run) -> None:
    old = key("create", "--name", "ci")
    new = key("rotate", "ci", "--overlap", "1h")
    ends = [opens(db, made) for made in (old, new)]
    assert ends[0] is not None
    assert ends[1] is not None
    assert ends[0].ends_at < ends[1].ends_at
    ids = [row["id"] for row in json.loads(key("list")) if row["name"] == "ci"]
    assert key("revoke", ids[1]) == f"{ids[1]} is revoked"
    gone = opens(db, new)
    assert gone is not None
    assert gone.revoked


def test_mistakes_are_one_line(key: Run) -> None:
    with pytest.raises(UserError, match="--expires-in: 'soon' is not an age"):
        key("create", "--name", "ci", "--expires-in", "soon")
    with pytest.raises(UserError, match="session's key is created with its session"):
        key("create", "--name", "ci", "--power", "session")
    with pytest.raises(AgentRLError, match="no key 'nobody'"):
        key("revoke", "nobody")
