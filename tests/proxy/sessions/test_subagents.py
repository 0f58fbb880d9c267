"""Sub-agents' sessions: opened under a session, in its group, ended with it, rewarded through it."""

from __future__ import annotations

from typing import Any

import pytest
from databases import KINDS

from agentrl.client import Client
from agentrl.store.training import returns

pytestmark = pytest.mark.parametrize("database_kind", KINDS)


def with_key(session: dict[str, Any]) -> dict[str, str]:
    return {"Authorization": f"Bearer {session['api_key']}"}


def child(proxy: Any, body: dict[str, Any], headers: dict[str, str]) -> dict[str, Any]:
    answer = proxy.post("/sessions", body, headers=headers)
    assert answer.status_code == 201, answer.text
    opened: dict[str, Any] = answer.json()
    return opened


def ask(proxy: Any, session: dict[str, Any]) -> None:
    proxy.sdk(session).chat.completions.create(model="test", messages=[{"role": "user", "content": "ab"}])


def test_the_parent_is_named_by_body_header_or_key(proxy):
    parent = proxy.session()
    run = {"Authorization": "Bearer run-key"}
    opened = [
        child(proxy, {"parent_session_id": parent["session_id"]}, run),
        child(proxy, {}, run | {"X-Parent-Session-Id": parent["session_id"]}),
        child(proxy, {}, with_key(parent)),
        child(proxy, {"parent_session_id": parent["session_id"]}, with_key(parent)),
    ]
    assert {s["parent_session_id"] for s in opened} == {parent["session_id"]}
    assert {s["group_id"] for s in opened} == {proxy.get(f"/sessions/{parent['session_id']}")["group_id"]}
    assert len({s["api_key"] for s in opened}) == 4
    assert proxy.get(f"/sessions/{opened[0]['session_id']}")["parent_session_id"] == parent["session_id"]
    below = child(proxy, {}, with_key(opened[0]))
    assert below["parent_session_id"] == opened[0]["session_id"]
    assert proxy.get("/api/run")["admitted"] == 1


def test_a_repeated_start_of_a_sub_session_gets_the_same(proxy, second):
    parent = proxy.session()
    headers = with_key(parent) | {"Idempotency-Key": "k"}
    first, again = child(proxy, {}, headers), child(second, {}, headers)
    assert (first["session_id"], first["api_key"]) == (again["session_id"], again["api_key"])


def test_an_invalid_sub_session_is_refused(proxy):
    parent, stranger = proxy.post("/groups").json()["sessions"]
    of_parent = {"parent_session_id": parent["session_id"]}
    refusals = [
        (of_parent, with_key(stranger), 403, "forbidden"),
        ({"parent_session_id": "nobody"}, {"Authorization": "Bearer run-key"}, 404, "session_not_found"),
        (of_parent | {"task": {"q": 1}}, with_key(parent), 422, "invalid_parameter"),
    ]
    for body, headers, status, code in refusals:
        answer = proxy.post("/sessions", body, headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    proxy.post(f"/sessions/{parent['session_id']}/end")
    answer = proxy.post("/sessions", of_parent, headers=with_key(parent))
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "session_sealed")


@pytest.mark.long_on("postgresql")
@pytest.mark.parametrize(("own", "expected"), [(None, 1.0), (0.25, 0.25)])
def test_a_sub_agent_ends_with_its_parent_and_is_trained_on_its_outcome(proxy, own, expected):
    parents = proxy.post("/groups").json()["sessions"]
    sub = child(proxy, {}, with_key(parents[0]))
    for session in [*parents, sub]:
        ask(proxy, session)
    if own is not None:
        proxy.post(f"/sessions/{sub['session_id']}/reward", {"value": own}, headers=with_key(sub))
    for session in parents:
        proxy.post(f"/sessions/{session['session_id']}/reward", {"value": 1.0})
        proxy.post(f"/sessions/{session['session_id']}/end")
    assert proxy.get(f"/sessions/{sub['session_id']}")["status"] == "completed"
    run = proxy.get("/api/run")
    assert (run["groups"], run["trajectories"]) == ({"ready": 1}, {"ready": 3})
    with proxy.database.read() as conn:
        of_sub = returns.of_sessions(conn, [sub["session_id"]], 1.0)[sub["session_id"]]
    assert list(of_sub.calls.values()) == [expected]
    assert (of_sub.episode_id, of_sub.episode_return) == (parents[0]["session_id"], 1.0)


@pytest.mark.long_on("postgresql")
def test_the_client_opens_sub_sessions(proxy):
    with Client(proxy.url, "run-key", timeout_s=20) as client, client.session() as s:
        with s.child({"role": "search"}) as sub:
            assert sub.heartbeat()
            assert sub.reward(0.5, name="found")
        with Client(s.base_url, s.api_key) as own, own.session() as other:
            assert other.heartbeat()
        assert proxy.get(f"/sessions/{sub.id}")["parent_session_id"] == s.id
        assert proxy.get(f"/sessions/{other.id}")["parent_session_id"] == s.id
        assert proxy.get(f"/sessions/{sub.id}")["metadata"] == {"role": "search"}
    assert proxy.get("/api/run")["admitted"] == 1


class TestBounds:
    @pytest.fixture
    def run_config(self, run_config: dict[str, Any]) -> dict[str, Any]:
        return run_config | {"proxy": {"max_subagent_depth": 2, "max_subagents_per_session": 2}}

    def test_a_tree_is_bounded_in_levels_and_number(self, proxy):
        parent = proxy.session()
        first = child(proxy, {}, with_key(parent))
        second = child(proxy, {}, with_key(first))
        deep = proxy.post("/sessions", {}, headers=with_key(second))
        assert (deep.status_code, deep.json()["error"]["code"]) == (422, "subagents_too_deep")
        wide = proxy.post("/sessions", {}, headers=with_key(parent))
        assert (wide.status_code, wide.json()["error"]["code"]) == (422, "too_many_subagents")
        named = {"Authorization": "Bearer run-key", "X-Session-ID": "n", "x-parent-session-id": parent["session_id"]}
        call = proxy.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, headers=named)
        assert (call.status_code, call.json()["error"]["code"]) == (422, "too_many_subagents")
