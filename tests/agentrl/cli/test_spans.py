"""`agentrl spans`: all ended sessions of a run after the fact, and what it says when it cannot send them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from databases import KINDS
from history import CONFIG, History
from span_receiver import SpanReceiver
from sqlalchemy import update
from typer.testing import CliRunner, Result

from agentrl.cli.main import app
from agentrl.errors import UserError
from agentrl.store import Database
from agentrl.store.exports import trace_rows
from agentrl.store.tables import runs as runs_table

pytestmark = pytest.mark.parametrize("database_kind", KINDS)


@pytest.fixture
def receiver() -> Iterator[SpanReceiver]:
    with SpanReceiver() as made:
        yield made


@pytest.fixture
def made(db: Database) -> History:
    """A run that sends no spans by itself."""
    played = History(db, seed=4)
    played.train(2)
    played.evaluation()
    return played


def spans(db: Database, *options: str) -> Result:
    return CliRunner().invoke(app, ["spans", "--run", "test", "--database-url", db.url, *options])


@pytest.mark.long_on("postgresql")
def test_a_finished_run_is_sent_whole(
    db: Database, made: History, receiver: SpanReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_rows, "PAGE_SESSIONS", 3)
    count = db.query(trace_rows.count, made.run_id)
    result = spans(db, "--endpoint", receiver.url)
    assert result.exit_code == 0, result.output
    assert result.output == f"{count} sessions, {len(receiver.spans)} spans: {receiver.url}\n"
    sessions = receiver.named("invoke_agent")
    assert len({span["agentrl.session.id"] for span in sessions}) == len(sessions) == count
    assert sum(span["agentrl.is_eval"] for span in sessions) == 1
    assert {"trained"} <= {state for span in sessions for state in span.get("agentrl.trajectory.states", [])}
    first = receiver.counted()
    assert spans(db, "--endpoint", receiver.url).exit_code == 0
    assert receiver.counted() == dict.fromkeys(first, 2)


@pytest.mark.long_on("postgresql")
def test_options_replace_the_settings_and_another_receiver_gets_no_key(
    db: Database, made: History, receiver: SpanReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"endpoint": receiver.url, "headers_env": "KEYS", "service_name": "mine"}
    config = CONFIG | {"metrics": {"traces": settings}}
    db.transact(lambda conn: conn.execute(update(runs_table).values(config=config)) and None)
    result = spans(db)
    assert isinstance(result.exception, UserError)
    assert "headers_env" in str(result.exception)
    monkeypatch.setenv("KEYS", "x-key=k")
    assert spans(db, "--contents").exit_code == 0
    assert receiver.requests[0]["x-key"] == "k"
    assert receiver.spans[0]["resource"]["service.name"] == "mine"
    assert any("gen_ai.input.messages" in span for span in receiver.spans)
    receiver.requests.clear()
    assert spans(db, "--endpoint", receiver.url).exit_code == 0
    assert "x-key" not in receiver.requests[0]


@pytest.mark.long_on("postgresql")
def test_what_cannot_work_is_one_line(db: Database, made: History, receiver: SpanReceiver, tmp_path: Path) -> None:
    assert str(spans(db).exception) == "the run has no metrics.traces: give --endpoint"
    assert str(spans(db, "--endpoint", "collector").exception).startswith("--endpoint: ")
    receiver.answers = [(401, b"who are you?", {})]
    error = spans(db, "--endpoint", receiver.url).exception
    assert isinstance(error, UserError)
    assert f"{receiver.url} takes no spans: status 401: who are you? (0 of " in str(error)


def test_rejected_spans_are_counted(db: Database, made: History, receiver: SpanReceiver) -> None:
    receiver.refuse = lambda spans: 400 if any(span["name"].startswith("invoke_agent") for span in spans) else None
    result = spans(db, "--endpoint", receiver.url)
    assert result.exit_code == 0
    assert "spans were rejected: status 400: refused" in result.output
    assert receiver.named("chat")
