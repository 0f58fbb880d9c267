"""`agentrl status`: the same facts from a proxy and from its store, on 80 columns; one line when there is nothing."""

from __future__ import annotations

import io
import json
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from run_records import create_run
from typer.testing import CliRunner

from agentrl.cli import status
from agentrl.cli.main import app
from agentrl.console import Console
from agentrl.domain.evaluation import Evaluation, Result
from agentrl.engine.server_process import free_port
from agentrl.errors import AgentRLError, StoreUnavailable, UserError
from agentrl.location import Location
from agentrl.proxy.app import Settings, create_app
from agentrl.store import Database, activity, events, part_ranks
from agentrl.testing import FakeEngine

CONFIG = {
    "name": "test",
    "model": "tiny",
    "agent": "a:B",
    "tasks": "t.jsonl",
    "steps": 10,
    "rollout": {"group_size": 2},
    "trainer": {"groups_per_step": 2},
}
NO_ENV = dict.fromkeys(("AGENTRL_PROXY_URL", "AGENTRL_RUN_KEY", "AGENTRL_ADMIN_KEY", "AGENTRL_DATABASE_URL"), "")


@pytest.fixture
def run_id(database_url: str, tiny_model: Path) -> str:
    database = Database(database_url)
    with database.write() as conn:
        made = create_run(conn, config=CONFIG, task_data=[{"n": 0}], base_model=tiny_model, steps=10)
        events.record(conn, made, "publish", {"version": 3, "stall_s": {"http://e": 0.25}}, "proxy")
    database.close()
    return made


@pytest.fixture
def proxy(database_url: str, run_id: str, fake_engine: FakeEngine) -> Iterator[str]:
    """Where a proxy of the run serves."""
    settings = Settings(
        database_url=database_url, run_name="test", engine_urls=[fake_engine.url], admin_key="admin-key", replica="here"
    )
    port = free_port()
    server = uvicorn.Server(uvicorn.Config(create_app(settings), host="127.0.0.1", port=port, log_level="warning"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the proxy did not start"
        time.sleep(0.01)
    yield f"http://127.0.0.1:{port}"
    server.should_exit = True
    thread.join(120)


def ask(*argv: str, **env: str) -> Any:
    return CliRunner().invoke(app, ["status", *argv], env=NO_ENV | env)


def play(proxy: str) -> None:
    """One conversation of two calls, one that forks, and one that fails."""
    import httpx

    headers = {"Authorization": "Bearer run-key"}
    session = httpx.post(f"{proxy}/groups", json={}, headers=headers).json()["sessions"][0]
    url = f"{session['base_url']}/chat/completions"

    def call(messages: list[dict[str, Any]]) -> dict[str, Any]:
        answer = httpx.post(url, json={"messages": messages}, headers=headers, timeout=120)
        assert answer.status_code == 200, answer.text
        message: dict[str, Any] = answer.json()["choices"][0]["message"]
        return message

    first = [{"role": "user", "content": "hello"}]
    said = call(first)
    call([*first, said, {"role": "user", "content": "more"}])
    call([{"role": "user", "content": "something else"}])


def test_a_proxy_and_its_store_say_the_same(proxy: str, database_url: str, fake_engine: FakeEngine) -> None:
    play(proxy)
    asked = ask("--proxy", proxy, "--json", AGENTRL_RUN_KEY="run-key")
    assert asked.exit_code == 0, asked.output
    found = json.loads(asked.stdout)
    assert found["run"]["name"] == "test"
    assert found["calls"]["by_status"] == {"complete": 3}
    assert found["calls"]["bridged"] == 1
    assert found["calls"]["forks"] == {"new_conversation": 1}
    assert found["calls"]["output_tokens_per_s"] == pytest.approx(12 / 60)
    assert 0 < found["calls"]["first_token_s"]["p50"] <= found["calls"]["latency_s"]["p95"]
    assert found["sessions"] == {"open": 2, "closing": 0}
    assert [(e["url"], e["state"], e["running"]) for e in found["engines"]] == [(fake_engine.url, "serving", 0)]
    stored = json.loads(ask("--database-url", database_url, "--json").stdout)
    for name in ("run", "calls", "sessions", "events", "in_flight"):
        assert stored[name] == found[name]


def test_the_screen_fits_into_80_columns(proxy: str) -> None:
    play(proxy)
    found = status.from_proxy(proxy, "admin-key", 60.0)
    found["engines"].append(
        {
            "url": "http://an-engine-with-a-long-name.example.internal:30000",
            "state": "dead",
            "version": None,
            "error": "no answer in time " * 5,
            "last_seen_at": 0.0,
            "running": 0,
        }
    )
    found["errors"] = [{"id": "01a", "status": "failed", "error": "a\nlong " * 40, "created_at": time.time() - 90}]
    known = Result({0: [0.0], 1: [1.0]}, failed=1, versions=[8, 9])
    found["evaluations"] = [
        Evaluation(8, 8, 2, {"sampled": known}).as_json(),
        Evaluation(10, 10, 64, {"sampled": known}).as_json(),
    ]
    assert found["run"]["skipped_tasks"] == 0
    found["run"]["skipped_tasks"] = 12
    assert found["checkpoint"] is None
    found["checkpoint"] = {"step": 8, "digest": "ab" * 32, "size_bytes": 3 << 30, "written_at": 0.0, "stored_at": 1.0}
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(status.screen(found, time.time()))
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= 80
    shown = "\n".join(lines)
    for said in (
        "test",
        "step 0 of 10",
        "step 8, abababababab, 3,072.0 MiB, on disk and in object storage",
        "12 skipped by the curriculum",
        "3 complete",
        "1 new_conversation",
        "serving",
        "dead",
        "publish",
        "1 min ago",
        "evaluation of step 10: 2 of 64 episodes",
        "step 8: sampled 0.500 [0.095, 0.905], 1 episodes failed",
    ):
        assert said in shown
    print(shown)


NOW = 1_000_000.0


@pytest.mark.long_on("postgresql")
@pytest.mark.parametrize(
    ("run_status", "seen_s_ago", "stopped_s_ago", "state", "engine"),
    [
        ("running", 3, None, "alive", "serving"),
        ("running", 60, None, "silent", "serving"),
        ("running", 60, 50, "silent", "serving"),  # it was resumed
        ("finished", 3, None, "alive", "serving"),  # its processes are about to end
        ("finished", 60, 50, "ended", "was serving"),
        ("finished", 3, 2, "ended", "was serving"),
        ("finished", 2, 3, "alive", "serving"),  # a proxy that was started for it afterwards
        ("paused", 60, None, "ended", "was serving"),
        ("failed", 60, None, "ended", "was serving"),
    ],
)
def test_the_processes_of_a_run_that_is_over_have_ended(
    database_url: str,
    run_id: str,
    run_status: str,
    seen_s_ago: float,
    stopped_s_ago: float | None,
    state: str,
    engine: str,
) -> None:
    found = status.from_store(Location(database_url=database_url, name="test"), 60.0)
    found["run"]["status"] = run_status
    found["engines"] = [{"url": "http://e", "state": "serving", "version": 3, "error": None, "last_seen_at": 0.0}]
    found["replicas"] = [{"kind": "proxy", "name": "p", "last_seen_at": NOW - seen_s_ago}]
    if stopped_s_ago is not None:
        found["events"] = [{"kind": "stopped", "data": {}, "created_at": NOW - stopped_s_ago, "source": "train"}]
    console = Console(width=80, record=True, file=open("/dev/null", "w"), force_terminal=True)  # noqa: SIM115
    console.print(status.screen(found, NOW))
    styled = console.export_text(styles=True)
    colors = {"alive": 32, "serving": 32, "silent": 31, "ended": 2, "was serving": 2}  # green, red, dim
    for shown in (state, engine):
        assert re.search(rf"\x1b\[{colors[shown]}m{shown} *\x1b", styled), styled
    assert f"last seen {seen_s_ago} s ago" in styled.replace("1 min", "60 s") or state == "alive"


def test_processes_say_where_they_run_and_what_they_do(database_url: str, run_id: str) -> None:
    found = status.from_store(Location(database_url=database_url, name="test"), 60.0)
    proxy = {"host": "node-1", "watches": 250, "calls": 31}
    found["replicas"] = [
        {"kind": "proxy", "name": "p", "last_seen_at": NOW, "about": proxy},
        {"kind": "proxy", "name": "q", "last_seen_at": NOW, "about": {**proxy, "ended": True}},
        {"kind": "worker", "name": "w", "last_seen_at": NOW, "about": {"host": "node-2", "sessions": 64}},
    ]
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(status.screen(found, NOW))
    shown = [" ".join(line.split()) for line in console.export_text().splitlines()]
    assert "proxy p alive on node-1, watches 250 engines, 31 calls" in shown
    assert "proxy q ended last seen 0 s ago" in shown
    assert "worker w alive on node-2, 64 sessions" in shown


def test_the_newest_run_is_shown_unless_one_is_named(database_url: str, run_id: str, tiny_model: Path) -> None:
    database = Database(database_url)
    with database.write() as conn:
        create_run(conn, name="later", config=CONFIG, base_model=tiny_model, key="k")
    database.close()
    assert json.loads(ask("--database-url", database_url, "--json").stdout)["run"]["name"] == "later"
    named = ask("--database-url", database_url, "--run", "test", "--json")
    assert json.loads(named.stdout)["run"]["name"] == "test"


def test_mistakes_are_one_line(proxy: str, database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"no proxy answers at http://127\.0\.0\.1:9"):
        status.from_proxy("http://127.0.0.1:9", "k", 60.0)
    with pytest.raises(UserError, match="answered 401: the API key is not valid"):
        status.from_proxy(proxy, "wrong", 60.0)
    with pytest.raises(UserError, match="not a valid URL"):
        status.from_proxy("not-an-address", "k", 60.0)
    cases: tuple[tuple[list[str], dict[str, str], str], ...] = (
        ([], {}, "which run"),
        (["--proxy", proxy], {}, "no key"),
        (["--proxy", proxy, "--run", "test"], {"AGENTRL_RUN_KEY": "run-key"}, "cannot be combined with --run"),
    )
    for argv, env, why in cases:
        asked = ask(*argv, **env)
        assert isinstance(asked.exception, UserError)
        assert why in str(asked.exception)


def test_an_empty_database_holds_no_run(database_url: str) -> None:
    with pytest.raises(UserError, match="has no runs"):
        status.from_store(Location(database_url=database_url, name=None), 60.0)


def test_another_server_is_refused_as_no_proxy(fake_engine: FakeEngine) -> None:
    with pytest.raises(UserError, match="not an agentrl proxy"):
        status.from_proxy(fake_engine.url, "k", 60.0)


def test_placed_processes_are_shown_by_host(run_id, database_url):
    database = Database(database_url)
    database.transact(part_ranks.declare, run_id, {"trainer": {"ranks": 2}, "proxy": {}})
    for part, rank, host in (("trainer", 0, "a"), ("trainer", 1, "b"), ("proxy", 0, "a")):
        runner = f"{part}{rank}"
        database.transact(part_ranks.claim, run_id, part, rank, runner, host=host, address=host, lease_s=60.0)
        database.transact(part_ranks.started, run_id, part, rank, runner, 1)
    database.transact(part_ranks.started, run_id, "trainer", 0, "trainer0", 2)
    database.transact(part_ranks.renew, run_id, "trainer", 1, "trainer1", -1.0)
    found = database.query(activity.of_run, run_id, 60.0)
    database.close()
    console = Console(file=io.StringIO(), width=100)
    console.print(status.screen(found, NOW))
    lines = console.file.getvalue().splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("host"))
    assert [line.split() for line in lines[start + 1 : start + 4]] == [
        ["a", "proxy/0", "running"],
        ["trainer/0", "running", "2", "starts"],
        ["b", "trainer/1", "lost"],
    ]


@pytest.mark.parametrize("error", [UserError("the run is gone"), StoreUnavailable("the database is away")])
def test_the_screen_is_refreshed_until_ctrl_c(
    database_url: str, run_id: str, monkeypatch: pytest.MonkeyPatch, error: AgentRLError
) -> None:
    """An error in between is shown below the last facts."""

    def refused(*_: Any) -> Any:
        raise error

    answers = iter([status.from_store, refused, status.from_store])

    def asked(found: Location, window_s: float) -> Any:
        return next(answers)(found, window_s)

    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(status, "from_store", asked)
    monkeypatch.setattr(status.time, "sleep", sleep)
    done = ask("--database-url", database_url, "--watch")
    assert (done.exit_code, slept) == (0, [status.EVERY_S] * 3)
    assert "step 0 of 10" in done.stdout


def test_facts_are_printed_as_json_lines_until_ctrl_c(
    database_url: str, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(status.time, "sleep", sleep)
    done = ask("--database-url", database_url, "--watch", "--json")
    assert done.exit_code == 0
    assert [json.loads(line)["run"]["name"] for line in done.stdout.splitlines()] == ["test", "test"]
