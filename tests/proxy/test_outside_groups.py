"""Groups whose sessions outside programs start one by one, through real proxies on both databases."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path
from threading import Barrier
from typing import Any

import httpx
import numpy as np
import pytest
from databases import KINDS
from sqlalchemy import select, text

from agentrl.client import Client
from agentrl.configs.algorithm import Algorithm
from agentrl.domain.schemas import Batch
from agentrl.engine.server_process import free_port
from agentrl.errors import RequestError
from agentrl.proxy.calls import sweep
from agentrl.store import Database
from agentrl.store.audit import run_audit
from agentrl.store.sessions.ends import missing_places
from agentrl.store.tables import groups
from agentrl.store.training import steps, trainer_epochs
from agentrl.testing import Reply
from agentrl.trainer.algorithms.advantages import turn_advantages

pytestmark = pytest.mark.parametrize("database_kind", KINDS)
SIZE = 8
NAMES = [f"task {i}" for i in range(3)]
PROGRAM = Path(__file__).with_name("group_program.py")


@pytest.fixture
def run_config(run_config: dict[str, Any]) -> dict[str, Any]:
    return run_config | {"rollout": {"group_size": SIZE, "min_group_size": 4}, "trainer": {"groups_per_step": 3}}


@pytest.fixture(autouse=True)
def audited(store_url: str) -> Any:
    """After every test, the audit of the run finds nothing."""
    yield
    database = Database(store_url)
    with database.read() as conn:
        (run_id,) = conn.execute(select(groups.c.run_id).distinct()).scalars()
        assert list(run_audit.scan(conn, run_id)) == []
    database.close()


def body(name: str, **more: Any) -> dict[str, Any]:
    return {"task": {"name": name}, "group": name, **more}


def refusal(answer: httpx.Response) -> tuple[int, str, str | None]:
    error = answer.json()["error"]
    return answer.status_code, error["code"], error["param"]


def play(proxy: Any, session: dict[str, Any], value: float) -> None:
    """A call, a reward and the end of a session."""
    messages: Any = [{"role": "user", "content": "ab"}]
    proxy.sdk(session).chat.completions.create(model="test", messages=messages)
    path = f"/sessions/{session['session_id']}"
    assert proxy.post(f"{path}/reward", {"value": value}).json()["applied"]
    assert proxy.post(f"{path}/end").json()["status"] == "completed"


def leased(proxy: Any, n_groups: int = 3) -> Batch:
    """What a trainer gets for its first step."""

    def take(conn: Any) -> Batch:
        epoch = trainer_epochs.begin_epoch(conn, proxy.run_id)
        step_id = steps.lease(conn, proxy.run_id, epoch, step=1, n_groups=n_groups, max_staleness=1, discount=1.0)
        assert step_id is not None
        return steps.batch(conn, step_id)

    return proxy.database.transact(take)


def check_batch(batch: Batch, sizes: list[int]) -> None:
    """The groups have these numbers of episodes, and each advantage is relative to its own group."""
    advantages = turn_advantages(batch.trajectories, Algorithm(preset="grpo"))
    found = []
    pairs = zip(batch.trajectories, advantages, strict=True)
    for _, members in groupby(sorted(pairs, key=lambda pair: pair[0].group_id), key=lambda pair: pair[0].group_id):
        of_group = list(members)
        returns = np.array([t.episode_return for t, _ in of_group])
        relative = (returns - returns.mean()) / (returns.std(ddof=1) + 1e-6)
        np.testing.assert_allclose([a.item() for _, a in of_group], relative, rtol=1e-3)
        assert np.abs(relative).max() > 0.5
        found.append(len({t.episode_id for t, _ in of_group}))
    assert sorted(found) == sorted(sizes)


@pytest.mark.long_on("sqlite")
def test_processes_on_two_replicas_fill_groups_that_the_trainer_leases_whole(proxy, second):
    """Four processes play two sessions of each of three groups, in orders of their own, several at a time."""
    processes = [
        subprocess.Popen(
            [sys.executable, PROGRAM, replica.url, str(SIZE), str(SIZE // 4), *NAMES[i % 3 :], *NAMES[: i % 3]],
            stderr=subprocess.PIPE,
            text=True,
        )
        for i, replica in enumerate([proxy, second] * 2)
    ]
    told = [process.communicate(timeout=120)[1] for process in processes]
    assert [process.returncode for process in processes] == [0] * 4, told
    run = proxy.get("/api/run")
    assert (run["admitted"], run["running"], run["returned"], run["groups"]) == (3, 0, 0, {"ready": 3})
    check_batch(leased(proxy), [SIZE] * 3)


@pytest.mark.long_on("sqlite")
def test_of_many_first_starts_at_once_one_creates_the_group(proxy, second):
    together = Barrier(SIZE + 2)

    def start(replica: Any) -> httpx.Response:
        together.wait(120)
        answer: httpx.Response = replica.post("/sessions", body("race"))
        return answer

    with ThreadPoolExecutor(SIZE + 2) as pool:
        answers = list(pool.map(start, [proxy, second] * (SIZE // 2 + 1)))
    opened = [answer.json() for answer in answers if answer.status_code == 201]
    assert sorted(session["sample_index"] for session in opened) == list(range(SIZE))
    assert len({session["group_id"] for session in opened}) == 1
    assert [refusal(answer) for answer in answers if answer.status_code != 201] == [(409, "group_full", "group")] * 2
    run = proxy.get("/api/run")
    assert (run["admitted"], run["running"]) == (1, 1)


@pytest.mark.long_on("sqlite")
def test_many_groups_are_started_at_once_in_orders_of_their_own(proxy, second):
    """No start waits for another one's database lock until it fails."""
    together = Barrier(6)

    def start(i: int) -> None:
        together.wait(120)
        for name in NAMES[i % 3 :] + NAMES[: i % 3]:
            answer = (proxy, second)[i % 2].post("/sessions", body(name))
            assert answer.status_code == 201, answer.text

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(start, range(6)))
    assert proxy.get("/api/run")["admitted"] == 3


@pytest.mark.long_on("postgresql")
def test_a_full_group_takes_no_more_sessions(proxy):
    opened = [proxy.post("/sessions", body("full", group_size=4)).json() for _ in range(4)]
    refused = proxy.post("/sessions", body("full", group_size=4))
    assert refusal(refused) == (409, "group_full", "group")
    assert refused.headers["x-should-retry"] == "false"
    assert "'full' is full: it has its 4 sessions" in refused.json()["error"]["message"]
    for i, session in enumerate(opened):
        play(proxy, session, float(i % 2))
    assert refusal(proxy.post("/sessions", body("full", group_size=4))) == (409, "group_full", "group")
    check_batch(leased(proxy, 1), [4])


@pytest.mark.long_on("postgresql")
def test_a_client_sees_why_it_may_not_join(proxy):
    with Client(proxy.url, "run-key", timeout_s=20) as client:
        with client.session({"name": "g"}, group="g", group_size=5) as one:
            assert one.sample_index == 0
            with client.session({"name": "g"}, group="g", group_size=5) as other:
                assert (other.group_id, other.sample_index) == (one.group_id, 1)
        with pytest.raises(RequestError, match="has group_size 5, not 8") as caught, client.session(group="g"):
            pass
        assert (caught.value.code, caught.value.param) == ("group_differs", "group_size")


@pytest.mark.long_on("postgresql")
@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"group": ""}, "group"),
        pytest.param({"group": "x" * 201}, "group", marks=pytest.mark.long),
        pytest.param({"group": "two\nlines"}, "group", marks=pytest.mark.long),
        pytest.param({"group": 7}, "group", marks=pytest.mark.long),
        pytest.param({"group": "g", "group_size": 0}, "group_size", marks=pytest.mark.long),
        pytest.param({"group": "g", "group_size": 1025}, "group_size", marks=pytest.mark.long),
        ({"group": "g", "group_size": 3}, "group_size"),  # min_group_size is 4
        ({"group_size": 8}, "group_size"),
        ({"group": "g", "is_eval": True}, "is_eval"),
        ({"group": "g", "parent_session_id": "PARENT"}, "group"),
        ({"group_size": 8, "parent_session_id": "PARENT"}, "group_size"),
    ],
)
def test_a_wrong_group_is_refused_by_name(proxy, wrong, param):
    parent = proxy.post("/sessions").json()["session_id"]
    answer = proxy.post("/sessions", {key: parent if value == "PARENT" else value for key, value in wrong.items()})
    assert (answer.status_code, answer.json()["error"]["param"]) == (422, param), answer.text
    assert proxy.get("/api/run")["admitted"] == 1


@pytest.mark.long_on("postgresql")
def test_an_evaluation_takes_no_name_of_a_group(proxy):
    proxy.post("/sessions")
    refused = proxy.post("/groups", {"is_eval": True, "task": {}, "group": "g"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (422, "group")


@pytest.mark.long_on("postgresql")
def test_only_the_first_start_waits_for_admission(proxy):
    for i in range(6):
        assert proxy.post("/sessions", body(f"group {i}")).status_code == 201
    assert refusal(proxy.post("/sessions", body("one more"))) == (429, "no_capacity", None)
    assert proxy.post("/sessions", body("group 3")).status_code == 201
    assert proxy.get("/api/run")["admitted"] == 6


@pytest.mark.long_on("sqlite")
def test_a_repeated_start_gets_the_same_session_at_any_replica(proxy, second):
    together = Barrier(4)

    def start(replica: Any) -> dict[str, Any]:
        together.wait(120)
        headers = {"Authorization": "Bearer run-key", "Idempotency-Key": "k"}
        answer = replica.post("/sessions", body("g"), headers=headers)
        assert answer.status_code == 201, answer.text
        return {name: answer.json()[name] for name in ("session_id", "api_key", "sample_index", "group_id")}

    with ThreadPoolExecutor(4) as pool:
        first, *others = pool.map(start, [proxy, second] * 2)
    assert others == [first] * 3
    status = second.post(f"/sessions/{first['session_id']}/heartbeat", headers={"x-api-key": first["api_key"]})
    assert status.json() == {"status": "open"}
    assert second.post("/sessions", body("g")).json()["sample_index"] == 1


@pytest.mark.long_on("postgresql")
def test_a_group_is_filled_across_a_restart_of_the_proxy(store_url, serve, proxy):
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with Client(url, "run-key", timeout_s=60) as client:
        with serve(store_url, [proxy.engine.url], port, replica="mortal"):
            before = [client.request("POST", "/sessions", body("g")) for _ in range(4)]
            play(proxy, before[0], 0.0)
        waits = threading.Event()
        client.on_wait = lambda pause_s, why: waits.set()
        with ThreadPoolExecutor(1) as pool:
            fifth = pool.submit(client.request, "POST", "/sessions", body("g"))  # while no proxy is there
            assert waits.wait(60)
            with serve(store_url, [proxy.engine.url], port, replica="mortal"):
                after = [fifth.result(), *(client.request("POST", "/sessions", body("g")) for _ in range(3))]
                for i, session in enumerate(before[1:] + after):
                    play(proxy, session, float(i % 2))
    assert sorted(session["sample_index"] for session in before + after) == list(range(SIZE))
    check_batch(leased(proxy, 1), [SIZE])


@pytest.mark.long_on("postgresql")
def test_the_sweep_gives_up_the_places_that_no_program_takes(proxy, until, monkeypatch):
    """Five of eight sessions can be trained; of another group three, which is less than min_group_size."""
    monkeypatch.setattr(sweep, "EVERY_S", 0.05)
    for name, n in (("enough", 5), ("too few", 3)):
        for i in range(n):
            play(proxy, proxy.post("/sessions", body(name)).json(), float(i % 2))
    assert proxy.get("/api/run")["groups"] == {"running": 2}
    long_ago(proxy, monkeypatch)
    until(lambda: proxy.get("/api/run")["groups"] == {"ready": 1, "rejected": 1})
    run = proxy.get("/api/run")
    assert (run["admitted"], run["running"], run["returned"]) == (2, 0, 1)
    query = select(groups.c.reject_reason).where(groups.c.state == "rejected")
    (why,) = proxy.database.query(lambda conn: conn.execute(query).scalars().all())
    assert why == "3 of 8 sessions started, 3 trainable, min_group_size is 4"
    told = proxy.get(f"/api/runs/{proxy.run_id}/events?kind={missing_places.UNFILLED}")
    assert sorted((event["data"]["group"], event["data"]["started"]) for event in told) == [
        ("enough", 5),
        ("too few", 3),
    ]
    assert refusal(proxy.post("/sessions", body("enough"))) == (409, "group_closed", "group")
    check_batch(leased(proxy, 1), [5])


@pytest.mark.long_on("postgresql")
def test_a_group_whose_check_fails_is_recorded_and_checked_again(proxy, until, monkeypatch, caplog):
    monkeypatch.setattr(sweep, "EVERY_S", 0.05)
    monkeypatch.setattr(sweep, "PUT_OFF_S", 0.05)
    play(proxy, proxy.post("/sessions", body("g")).json(), 1.0)
    settle = missing_places.settle_group

    def broken(*args: Any) -> None:
        raise KeyError("damaged")

    monkeypatch.setattr(missing_places, "settle_group", broken)
    long_ago(proxy, monkeypatch)
    stuck = until(lambda: proxy.get(f"/api/runs/{proxy.run_id}/events?kind=group_stuck"))
    assert [event["data"]["error"] for event in stuck] == ["KeyError('damaged')"]
    assert "cannot be dealt with" in caplog.text
    monkeypatch.setattr(missing_places, "settle_group", settle)
    until(lambda: proxy.get("/api/run")["groups"] == {"rejected": 1})


def long_ago(proxy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The proxy has run, and nothing has happened in the run's groups, for an hour."""
    check: Callable[..., bool] = missing_places.check_due_group

    def since_ever(*args: Any, heard_since: float) -> bool:
        return check(*args, heard_since=heard_since - 3600)

    monkeypatch.setattr(missing_places, "check_due_group", since_ever)
    with proxy.database.write() as conn:
        conn.execute(text("UPDATE sessions SET created_at = created_at - 3600, ended_at = ended_at - 3600"))
        conn.execute(text("UPDATE groups SET created_at = created_at - 3600, due_at = due_at - 3600"))


@pytest.mark.long_on("postgresql")
def test_the_program_of_the_documentation_plays_a_group(proxy):
    page = (Path(__file__).parents[2] / "docs" / "sessions.md").read_text()
    section = page.partition("## Groups of outside programs")[2]
    program = section.partition("```python\n")[2].partition("```")[0]
    proxy.engine.enqueue(*(Reply(proxy.says(text)) for text in ["dcba", "abcd"] * (SIZE // 2)))
    env = os.environ | {"AGENTRL_PROXY_URL": proxy.url, "AGENTRL_RUN_KEY": "run-key"}
    result = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    check_batch(leased(proxy, 1), [SIZE])
