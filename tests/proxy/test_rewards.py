"""Rewards over HTTP: how far they reach, what supersedes, who gave them, and when they are too late."""

from __future__ import annotations

from typing import Any

import pytest
from databases import KINDS
from sqlalchemy import select

from agentrl.configs.config_files import parse_config
from agentrl.domain.schemas import SessionStatus
from agentrl.store.sessions import session_limits
from agentrl.store.sessions.ends import session_rewards
from agentrl.store.tables import sessions as sessions_table
from agentrl.store.training import returns, rewards, steps, trainer_epochs

pytestmark = pytest.mark.parametrize("database_kind", KINDS)
RUN = {"Authorization": "Bearer run-key"}


@pytest.fixture
def proxy(shared_proxy):
    return shared_proxy


@pytest.fixture
def run_config(run_config: dict[str, Any]) -> dict[str, Any]:
    """An ended session waits an hour for its reward."""
    return run_config | {"proxy": {"reward_timeout_s": 3600.0}, "rollout": {"group_size": 2, "min_group_size": 1}}


def chat(proxy: Any, session: dict[str, Any], *messages: str) -> Any:
    roles = ["user", "assistant"]
    asked = [{"role": roles[i % 2], "content": text} for i, text in enumerate(messages)]
    return proxy.sdk(session).chat.completions.create(model="test", messages=asked)


def give(proxy: Any, session: dict[str, Any], value: float, **fields: Any) -> dict[str, Any]:
    answer = proxy.post(f"/sessions/{session['session_id']}/reward", {"value": value, **fields})
    assert answer.status_code == 200, answer.text
    given: dict[str, Any] = answer.json()
    return given


def end(proxy: Any, session: dict[str, Any]) -> str:
    return str(proxy.post(f"/sessions/{session['session_id']}/end").json()["status"])


def call_returns(proxy: Any, session: dict[str, Any]) -> list[float]:
    """The returns of the session's calls, in the order they were made."""
    with proxy.database.read() as conn:
        calls = returns.of_sessions(conn, [session["session_id"]], 1.0)[session["session_id"]].calls
    return [calls[key] for key in sorted(calls)]


@pytest.mark.long_on("postgresql")
def test_a_branch_keeps_its_reward_to_its_own_path(proxy):
    """Two answers to two first messages: one session, two paths."""
    session = proxy.session()
    left, right = chat(proxy, session, "left"), chat(proxy, session, "right")
    give(proxy, session, 1.0, interaction_id=right.id, scope="branch")
    assert call_returns(proxy, session) == [0.0, 1.0]
    give(proxy, session, 0.25, interaction_id=right.id)  # a call's own reward also counts for the calls before it
    assert call_returns(proxy, session) == [0.25, 1.25]
    assert left.id != right.id


@pytest.mark.long_on("postgresql")
@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"scope": "brunch", "interaction_id": "x"}, "invalid_value"),
        ({"scope": "branch"}, "invalid_value"),
        ({"scope": "session", "interaction_id": "x"}, "invalid_value"),
    ],
)
def test_a_scope_that_does_not_fit_is_refused_by_name(proxy, fields, code):
    session = proxy.session()
    answer = proxy.post(f"/sessions/{session['session_id']}/reward", {"value": 1.0, **fields})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (422, code, "scope")


def test_the_reward_history_has_every_value_with_its_name_and_source(proxy):
    session = proxy.session()
    answer = chat(proxy, session, "ab")
    give(proxy, session, 0.1)
    give(proxy, session, 0.9)
    give(proxy, session, 0.5, name="style", source="judge")
    give(proxy, session, 0.2, interaction_id=answer.id, source="human")
    path = f"/sessions/{session['session_id']}/rewards"
    history = proxy.get(path, headers={"x-api-key": session["api_key"]})
    assert [(r["value"], r["name"], r["source"], r["scope"], r["applied"]) for r in history] == [
        (0.1, "reward", "agent", "session", True),
        (0.9, "reward", "agent", "session", True),
        (0.5, "style", "judge", "session", True),
        (0.2, "reward", "human", "call", True),
    ]
    assert [r["interaction_id"] for r in history] == [None, None, None, answer.id.removeprefix("chatcmpl-")]
    assert call_returns(proxy, session) == pytest.approx([0.9 + 0.5 + 0.2])
    assert proxy.http.get(f"{proxy.url}/sessions/nobody/rewards", headers=RUN).status_code == 404


@pytest.mark.parametrize("by_header", [False, True])
def test_a_repeated_reward_gets_the_first_answer_at_any_replica(proxy, second, by_header):
    session = proxy.session()
    path = f"/sessions/{session['session_id']}/reward"
    body, headers = ({}, RUN | {"Idempotency-Key": "k"}) if by_header else ({"idempotency_key": "k"}, RUN)
    first = proxy.post(path, {"value": 0.5} | body, headers=headers).json()
    assert second.post(path, {"value": 0.7} | body, headers=headers).json() == first
    assert [r["value"] for r in proxy.get(f"{path}s")] == [0.5]


def test_a_reward_and_the_end_of_the_wait_are_one(proxy, run_config, monkeypatch):
    """A crash between the two would leave a session that is rewarded and never built."""
    session = proxy.session()
    chat(proxy, session, "ab")
    end(proxy, session)

    class Crash(Exception):
        pass

    def crash(*_: Any) -> str:
        raise Crash

    limits = session_limits.Limits.of(parse_config(run_config))
    with monkeypatch.context() as patch:
        patch.setattr(session_rewards, "settle", crash)
        with pytest.raises(Crash):
            proxy.database.transact(session_rewards.reward, session["session_id"], limits, value=1.0)
    with proxy.database.read() as conn:
        assert rewards.history(conn, session["session_id"]) == []
    give(proxy, session, 1.0)
    with proxy.database.read() as conn:
        row = conn.execute(select(sessions_table).where(sessions_table.c.id == session["session_id"])).one()
    assert (row.built, row.status) == (True, SessionStatus.COMPLETED)


@pytest.mark.long_on("postgresql")
@pytest.mark.parametrize("prefix", ["", "chatcmpl-", "cmpl-", "resp_", "msg_"])
def test_a_call_is_rewarded_by_its_id_in_any_dialect(proxy, prefix):
    session = proxy.session()
    ask = {"messages": [{"role": "user", "content": "abcd"}]}
    path = f"/sessions/{session['session_id']}"
    call_id = proxy.post(f"{path}/v1/chat/completions", ask).json()["id"].removeprefix("chatcmpl-")
    assert proxy.post(f"{path}/reward", {"value": 0.5, "interaction_id": prefix + call_id}).status_code == 200
    (given,) = proxy.get(f"{path}/rewards")
    assert given["interaction_id"] == call_id


def test_no_route_takes_a_reward_beyond_the_bound(proxy):
    """Two of 1.7e308 would add up to an infinite return; while the session is open, and when it waits for rewards."""
    session = proxy.session()
    chat(proxy, session, "ab")
    key = {"Authorization": f"Bearer {session['api_key']}"}
    for state in ("open", "completed"):
        for value in ("1.7e308", "-1000001", "1e999", "NaN", "Infinity", "1" + "0" * 400):
            for path, field in ((f"/sessions/{session['session_id']}/reward", "value"), ("/rl/set_reward", "reward")):
                answer = proxy.http.post(proxy.url + path, content=f'{{"{field}": {value}}}', headers=key)
                assert answer.status_code == 422, (state, path, value, answer.text)
        assert end(proxy, session) == "completed"
    assert proxy.get(f"/sessions/{session['session_id']}/rewards") == []
    assert give(proxy, session, -1e6)["applied"]


class TestWithOwnRun:
    """States of groups, and leases."""

    @pytest.fixture
    def proxy(self, own_proxy):
        return own_proxy

    @pytest.mark.long_on("postgresql")
    def test_a_late_reward_ends_the_wait_and_the_group_is_ready(self, proxy):
        group = proxy.post("/groups").json()["sessions"]
        for session in group:
            chat(proxy, session, "ab")
            assert end(proxy, session) == "completed"
        assert proxy.get("/api/run")["groups"] == {"running": 1}
        for session in group:
            assert give(proxy, session, 1.0)["applied"]
        run = proxy.get("/api/run")
        assert (run["groups"], run["trajectories"]) == ({"ready": 1}, {"ready": 2})
        assert give(proxy, group[0], 0.5)["applied"]  # until it is leased, a correction counts
        assert call_returns(proxy, group[0]) == [0.5]

    def test_a_reward_after_the_lease_is_kept_and_not_applied(self, proxy):
        group = proxy.post("/groups").json()["sessions"]
        for session in group:
            chat(proxy, session, "ab")
            give(proxy, session, 1.0)
            end(proxy, session)
        with proxy.database.write() as conn:
            epoch = trainer_epochs.begin_epoch(conn, proxy.run_id)
            assert steps.lease(conn, proxy.run_id, epoch, step=1, n_groups=1, max_staleness=1, discount=1.0)
        assert give(proxy, group[0], 0.0)["applied"] is False
        assert call_returns(proxy, group[0]) == [1.0]
        assert [r["applied"] for r in proxy.get(f"/sessions/{group[0]['session_id']}/rewards")] == [True, False]

    @pytest.mark.long_on("postgresql")
    def test_a_reward_after_the_rejection_is_kept_and_not_applied(self, proxy):
        group = proxy.post("/groups").json()["sessions"]
        for session in group:
            proxy.http.delete(f"{proxy.url}/sessions/{session['session_id']}", headers=RUN)
        assert proxy.get("/api/run")["groups"] == {"rejected": 1}
        assert give(proxy, group[0], 1.0)["applied"] is False
