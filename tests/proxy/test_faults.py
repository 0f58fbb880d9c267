"""What the proxy does while its database refuses, hangs up, or is damaged: it says so, goes on, and catches up."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from databases import KINDS
from serving import add_version
from sqlalchemy import select, text, update

from agentrl.errors import StoreError, StoreUnavailable
from agentrl.proxy.calls import call_records, sweep
from agentrl.proxy.engines import engine_records, publishing
from agentrl.store import Database, fleet, silence
from agentrl.store.sessions.ends import liveness
from agentrl.store.tables import runs
from agentrl.store.training import publishes, trainer_epochs

RUN = {"Authorization": "Bearer run-key"}
ADMIN = {"Authorization": "Bearer admin-key"}


class Flaky:
    """Raises a few times what a database raises, then does what it stands for."""

    def __init__(self, really: Callable[..., Any], *errors: StoreError) -> None:
        self.really = really
        self.errors = list(errors)
        self.raised = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.errors:
            self.raised += 1
            raise self.errors.pop(0)
        return self.really(*args, **kwargs)


def faults() -> list[StoreError]:
    """One that `transact` and `query` do not wait out, so that it reaches the caller at once."""
    return [StoreError("disk is full"), StoreError("disk is full")]


def test_an_engines_state_is_recorded_when_the_database_is_back(proxy, monkeypatch, until):
    until(lambda: [e["state"] for e in proxy.get("/api/engines")] == ["serving"])
    save = Flaky(fleet.save, *faults())
    monkeypatch.setattr(fleet, "save", save)
    proxy.engine.stop()
    until(lambda: proxy.get("/api/engines")[0]["state"] == "dead")
    assert save.raised == 2


def test_an_engine_that_comes_back_during_a_fault_serves_in_the_end(proxy, monkeypatch, until):
    """The path of its weights cannot be read at first."""
    until(lambda: [e["state"] for e in proxy.get("/api/engines")] == ["serving"])
    version = Flaky(engine_records.runs.version, *faults())
    monkeypatch.setattr(engine_records.runs, "version", version)
    proxy.engine.stop()
    until(lambda: proxy.get("/api/engines")[0]["state"] == "dead")
    proxy.engine.base_version = 7  # it restarts with other weights than the run's
    proxy.engine.start()
    until(lambda: proxy.get("/api/engines")[0]["state"] == "serving")
    assert version.raised == 2
    assert proxy.engine.version == "0"


@pytest.mark.parametrize("part", ["beat", pytest.param("due", marks=pytest.mark.long), "check_session"])
def test_the_sweep_continues_after_a_database_fault(proxy, monkeypatch, until, caplog, part):
    module = {"beat": sweep.heartbeats, "due": liveness, "check_session": silence}[part]
    flaky = Flaky(getattr(module, part), *faults())
    monkeypatch.setattr(module, part, flaky)
    monkeypatch.setattr(sweep, "EVERY_S", 0.05)
    with caplog.at_level(logging.ERROR):
        session = proxy.session()
        with proxy.database.write() as conn:  # overdue, and older than a session may get
            conn.execute(text("UPDATE sessions SET due_at = 0, created_at = 0"))
        until(lambda: proxy.get(f"/sessions/{session['session_id']}")["status"] == "failed" and flaky.raised == 2)
    assert "disk is full" in caplog.text


def test_an_answer_that_cannot_be_recorded_is_not_delivered(proxy, monkeypatch):
    finish = Flaky(call_records.call_outcomes.finish, *faults()[:1])
    monkeypatch.setattr(call_records.call_outcomes, "finish", finish)
    session = proxy.session()
    body = {"messages": [{"role": "user", "content": "hi"}]}
    headers = {"Authorization": f"Bearer {session['api_key']}"}
    refused = proxy.http.post(session["base_url"] + "/chat/completions", json=body, headers=headers)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "not_recorded")
    assert [call["status"] for call in proxy.calls(session)] == ["failed"]
    assert proxy.http.post(session["base_url"] + "/chat/completions", json=body, headers=headers).status_code == 200


@pytest.fixture
def database(store_url: str) -> Iterator[Database]:
    """That of a run whose proxies have all gone."""
    opened = Database(store_url)
    yield opened
    opened.close()


def test_a_publish_that_a_dead_proxy_began_is_finished_after_a_fault(
    database, fake_engine, serve, store_url, monkeypatch, until
):
    with database.write() as conn:
        conn.execute(text("UPDATE weight_versions SET state = 'pending'"))
    pending = Flaky(publishes.pending, *faults())
    monkeypatch.setattr(publishes, "pending", pending)
    with serve(store_url, [fake_engine.url], 0):
        until(lambda: published(database) == ["published"])
    assert pending.raised == 2


def test_a_starting_proxy_does_not_publish_a_version_held_for_an_evaluation(
    database, fake_engine, serve, store_url, monkeypatch, until, tmp_path
):
    with database.read() as conn:
        run_id = conn.scalars(select(runs.c.id)).one()
    add_version(database, run_id, 1, tmp_path)
    seen: list[bool] = []
    holds = publishing.evaluation_episodes.paused

    def asked(*args: Any) -> bool:
        seen.append(holds(*args))
        return seen[-1]

    monkeypatch.setattr(publishing.evaluation_episodes, "paused", asked)
    for hold in (True, False):
        with database.write() as conn:
            config = {**conn.scalars(select(runs.c.config)).one(), "evaluation": {"tasks": "t.jsonl", "hold": hold}}
            conn.execute(update(runs).values(config=config))
        with serve(store_url, [fake_engine.url], 0):
            until(lambda: seen)
            if not hold:
                until(lambda: published(database) == ["published", "published"])
        assert seen == [hold]
        assert published(database) == ["published", "pending" if hold else "published"]
        seen.clear()


def published(database: Database) -> list[str]:
    with database.read() as conn:
        return list(conn.scalars(text("SELECT state FROM weight_versions ORDER BY version")))


def test_a_version_older_than_the_runs_is_not_published_again(proxy):
    """A pending version of a step that the run has gone past would be refused for ever."""
    with proxy.database.write() as conn:
        conn.execute(text("UPDATE weight_versions SET state = 'pending'"))
        assert publishes.pending(conn, proxy.run_id) == 0
        conn.execute(text("UPDATE runs SET published_step = 2"))
        assert publishes.pending(conn, proxy.run_id) is None


@pytest.mark.parametrize("error", [StoreUnavailable("away"), StoreError("disk is full")])
@pytest.mark.parametrize(("method", "path"), [("get", "/api/run"), ("post", "/groups"), ("post", "/heartbeat")])
def test_an_unavailable_store_is_a_503_with_retry_after(proxy, monkeypatch, error, method, path):
    def refuse(*_: Any, **__: Any) -> Any:
        raise error

    for name in ("query", "asubmit"):
        monkeypatch.setattr(f"agentrl.store.db.database.Database.{name}", refuse)
    body = {"json": {"owner": "w"}} if method == "post" else {}
    answer = proxy.http.request(method, proxy.url + path, headers=RUN, **body)
    assert answer.status_code == 503, answer.text
    assert answer.json()["error"]["code"] == "store_unavailable"
    assert answer.headers["retry-after"] == "1"
    assert str(error) in answer.json()["error"]["message"]


def test_a_trainer_whose_epoch_is_over_is_told_so(proxy):
    with proxy.database.write() as conn:
        old = trainer_epochs.begin_epoch(conn, proxy.run_id)
        trainer_epochs.begin_epoch(conn, proxy.run_id)
    answer = proxy.post("/admin/publish", {"version": 0, "epoch": old}, headers=ADMIN)
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "epoch_over")
    assert proxy.engine.calls == []  # no engine was touched


@pytest.mark.parametrize("database_kind", KINDS[1:])
def test_a_group_is_played_while_database_connections_are_lost(proxy, until):
    """The server hangs up on everybody, again and again, while a group is played."""

    def hang_up() -> None:
        with proxy.database.write() as conn:
            conn.execute(
                text(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                    "WHERE datname = current_database() AND pid != pg_backend_pid()"
                )
            )

    hang_up()
    opened = proxy.post("/groups", {"owner": "w"}).json()["sessions"]
    for session in opened:
        path = f"/sessions/{session['session_id']}"
        for step in ("call", "reward", "end"):
            hang_up()
            if step == "call":
                proxy.sdk(session).chat.completions.create(model="test", messages=[{"role": "user", "content": "ab"}])
            else:
                body = {"value": 1.0} if step == "reward" else {}
                assert proxy.post(f"{path}/{step}", body).status_code == 200
    assert proxy.get("/api/run")["groups"] == {"ready": 1}
