"""One endpoint and the run's key for many rollouts: sessions that clients open by a name of their own."""

from __future__ import annotations

import threading
import time
from typing import Any

import anthropic
import openai
import pytest
from databases import KINDS
from sqlalchemy import select

from agentrl.store.audit import run_audit
from agentrl.store.sessions.ends import liveness
from agentrl.store.sessions.session_limits import Limits
from agentrl.store.tables import groups
from agentrl.store.tables import sessions as sessions_table

pytestmark = pytest.mark.parametrize("database_kind", KINDS)
HELLO: Any = [{"role": "user", "content": "ab"}]
RUN = {"Authorization": "Bearer run-key"}


@pytest.fixture
def named() -> bool:
    return True


@pytest.fixture
def run_config(run_config: dict[str, Any], named: bool) -> dict[str, Any]:
    proxy = {"named_sessions": named, "reward_timeout_s": 60, "max_concurrent_calls_per_session": 64}
    rollout = {"min_group_size": 1, "group_size": 2}
    return run_config | {"proxy": proxy, "rollout": rollout}


def ask(replica: Any, name: str, *, key: str = "run-key", url: str = "/v1", says: str = "fine", **headers: str) -> Any:
    """A client that knows one address, one key and a name for each rollout."""
    sdk = openai.OpenAI(base_url=replica.url + url, api_key=key, max_retries=0, default_headers={"X-Session-ID": name})
    replica.engine.enqueue(replica.says(says))
    more = {header.replace("_", "-"): value for header, value in headers.items()}
    return sdk.chat.completions.create(model="test", messages=HELLO, extra_headers=more)


def rows(proxy: Any) -> list[Any]:
    return list(proxy.database.query(lambda conn: conn.execute(select(sessions_table)).all()))


def test_the_first_call_opens_the_session_and_every_replica_finds_it(proxy, second):
    for replica in (proxy, second, proxy):
        ask(replica, "rollout-1")
    ask(second, "rollout-2")
    first, other = (proxy.get(f"/sessions/{name}") for name in ("rollout-1", "rollout-2"))
    assert (first["name"], first["interactions"], other["interactions"]) == ("rollout-1", 3, 1)
    assert first["group_id"] != other["group_id"]
    assert first["session_id"] != "rollout-1"
    assert proxy.get(f"/sessions/{first['session_id']}") == first
    assert proxy.get("/api/run")["admitted"] == 2


def test_of_many_first_calls_at_once_one_opens_the_session(proxy, second):
    """And the place that it takes is one."""
    n, problems = 16, list[Exception]()
    proxy.engine.enqueue(*(proxy.says("fine") for _ in range(n)))

    def call(replica: Any) -> None:
        try:
            sdk = openai.OpenAI(base_url=replica.url + "/v1", api_key="run-key", max_retries=0)
            sdk.chat.completions.create(model="test", messages=HELLO, extra_headers={"X-Session-ID": "race"})
        except openai.APIError as problem:
            problems.append(problem)

    threads = [threading.Thread(target=call, args=(replica,)) for replica in (proxy, second) * (n // 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    assert [row.name for row in rows(proxy)] == ["race"]
    assert proxy.get("/sessions/race")["interactions"] == n
    run = proxy.get("/api/run")
    assert (run["admitted"], run["running"]) == (1, 1)


@pytest.mark.long_on("postgresql")
def test_a_named_session_is_rewarded_and_ended_by_its_name(proxy, second):
    for name, value in (("a", 1.0), ("b", 0.0)):
        ask(proxy, name)
        assert second.post(f"/sessions/{name}/reward", {"value": value}).json()["applied"]
        assert second.post(f"/sessions/{name}/end").json() == {"status": "completed", "interactions": 1}
        assert len(second.get(f"/sessions/{name}/trace")["calls"]) == 1
        assert second.get(f"/sessions/{name}/rewards")[0]["value"] == value
    assert proxy.get("/api/run")["groups"] == {"ready": 2}
    with pytest.raises(openai.ConflictError) as told:
        ask(proxy, "a")
    assert told.value.code == "session_sealed"
    with proxy.database.read() as conn:
        assert list(run_audit.scan(conn, proxy.run_id)) == []


@pytest.mark.long_on("postgresql")
@pytest.mark.parametrize("stream", [False, True])
def test_a_call_with_the_done_header_ends_the_session(proxy, until, stream):
    ask(proxy, "a")
    proxy.engine.enqueue(proxy.says("bye"))
    sdk = openai.OpenAI(base_url=proxy.url + "/v1", api_key="run-key", max_retries=0)
    headers = {"X-Session-ID": "a", "X-Session-Done": "true"}
    answer: Any = sdk.chat.completions.create(model="test", messages=HELLO, extra_headers=headers, stream=stream)
    if stream:
        list(answer)
    until(lambda: proxy.get("/sessions/a")["status"] == "completed")
    calls = proxy.get("/sessions/a/trace")["calls"]
    assert [call["status"] for call in calls] == ["complete", "complete"]
    until(lambda: [c["delivery"] for c in proxy.get("/sessions/a/trace")["calls"]] == ["given", "given"])
    assert proxy.post("/sessions/a/reward", {"value": 1.0}).json()["applied"], "it waits for its reward"


def test_a_session_key_may_send_the_done_header(proxy, until):
    session = proxy.session()
    ask(proxy, session["session_id"], key=session["api_key"], X_Session_Done="1")
    until(lambda: proxy.get(f"/sessions/{session['session_id']}")["status"] == "completed")
    other = proxy.session()
    with pytest.raises(openai.BadRequestError) as told:
        ask(proxy, other["session_id"], key=other["api_key"], X_Session_Done="maybe")
    assert told.value.param == "X-Session-Done"
    ask(proxy, other["session_id"], key=other["api_key"], X_Session_Done="false")
    assert proxy.get(f"/sessions/{other['session_id']}")["status"] == "open"


def test_a_silent_named_session_is_completed(proxy):
    """Its client may know no other way to end it; what it did counts."""
    ask(proxy, "a")
    proxy.post("/sessions/a/reward", {"value": 1.0})
    (session_id,) = [row.id for row in rows(proxy)]
    limits = Limits.of(_config(proxy))

    def silent(conn: Any) -> None:
        conn.execute(sessions_table.update().values(last_seen_at=time.time() - 10_000, due_at=0.0))
        liveness.check_due_session(conn, session_id, limits, heard_since=0.0)

    proxy.database.transact(silent)
    assert proxy.get("/sessions/a")["status"] == "completed"
    assert proxy.get("/api/run")["groups"] == {"ready": 1}


def _config(proxy: Any) -> Any:
    from agentrl.configs.run_config import RunConfig
    from agentrl.store import runs

    with proxy.database.read() as conn:
        return RunConfig.model_validate(runs.get(conn, proxy.run_id).config)


def test_admission_decides_as_for_every_start(proxy):
    for i in range(4):
        ask(proxy, f"r{i}")
    with pytest.raises(openai.RateLimitError) as told:
        ask(proxy, "one more")
    assert told.value.code == "no_capacity"
    assert told.value.response.headers["retry-after"] == "1"
    ask(proxy, "r0")


@pytest.mark.long_on("postgresql")
@pytest.mark.parametrize("name", ["x" * 201, "a\tb", ""])
def test_an_invalid_session_name_is_refused(proxy, name):
    with pytest.raises(openai.BadRequestError) as told:
        ask(proxy, name)
    assert told.value.param == "X-Session-ID"
    assert rows(proxy) == []


def test_only_a_model_call_with_a_run_key_opens_a_named_session(proxy):
    session = proxy.session()
    with pytest.raises(openai.PermissionDeniedError):
        ask(proxy, "mine", key=session["api_key"])
    with pytest.raises(openai.AuthenticationError):
        ask(proxy, "mine", key="wrong")
    with pytest.raises(openai.NotFoundError):
        ask(proxy, "", url="/sessions/mine/v1")
    count = proxy.post(
        "/v1/messages/count_tokens", {"model": "test", "messages": HELLO}, headers=RUN | {"X-Session-ID": "m"}
    )
    assert count.status_code == 404
    assert proxy.http.get(f"{proxy.url}/sessions/mine", headers=RUN).status_code == 404
    assert {row.name for row in rows(proxy)} == {None}


@pytest.mark.long_on("postgresql")
def test_a_session_name_is_not_a_key(proxy):
    ask(proxy, "a")
    (row,) = rows(proxy)
    for key in ("a", row.key_hash):
        assert proxy.post("/v1/chat/completions", {"messages": HELLO}, headers={"x-api-key": key}).status_code == 401
    digests = proxy.database.query(lambda conn: conn.execute(select(groups.c.start_digest)).scalars().all())
    assert digests[0] is not None


def test_anthropic_s_clients_and_sub_agents_go_by_names_as_well(proxy):
    sdk = anthropic.Anthropic(base_url=proxy.url, api_key="run-key", max_retries=0)
    for _ in range(2):
        proxy.engine.enqueue(proxy.says("fine"))
        sdk.messages.create(model="test", max_tokens=8, messages=HELLO, extra_headers={"X-Session-ID": "a"})
    ask(proxy, "helper", x_parent_session_id="a")
    root = proxy.get("/sessions/a")
    (child,) = root["children"]
    assert (root["interactions"], proxy.get(f"/sessions/{child}")["metadata"]) == (2, {"name": "helper"})
    assert proxy.get(f"/sessions/{child}")["parent_session_id"] == root["session_id"]


class TestWithoutNamedSessions:
    @pytest.fixture
    def named(self) -> bool:
        return False

    def test_without_the_setting_no_named_session_is_opened(self, proxy):
        with pytest.raises(openai.NotFoundError) as told:
            ask(proxy, "a")
        assert told.value.code == "session_not_found"
        assert rows(proxy) == []
