"""The client waits when told to, retries what may be retried, and counts nothing twice."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agentrl import client as package
from agentrl.client import LONGEST_ERROR, AsyncClient, Client
from agentrl.errors import RequestError, UserError

SCRIPT = Path(__file__).parents[2] / "scripts" / "blocking_client.py"


@pytest.fixture
def client(proxy: Any) -> Any:
    with Client(proxy.url, "run-key", timeout_s=30) as made:
        yield made


def refuse(status: int, code: str, **headers: str) -> Any:
    from starlette.responses import JSONResponse

    return JSONResponse({"error": {"message": code, "type": code, "param": None, "code": code}}, status, headers)


def test_a_session_is_opened_rewarded_and_completed(proxy: Any, client: Client) -> None:
    with client.session(task={"q": 1}, metadata={"who": "me"}) as s:
        assert s.base_url.endswith(f"/sessions/{s.id}/v1")
        assert s.reward(0.5, "chatcmpl-1", name="style")
    assert proxy.sessions[s.id]["status"] == "completed"
    assert proxy.sessions[s.id]["metadata"] == {"who": "me"}
    (reward,) = proxy.rewards
    assert (reward["value"], reward["interaction_id"], reward["name"]) == (0.5, "chatcmpl-1", "style")


def test_a_session_fails_with_any_text_of_the_error(proxy: Any, client: Client) -> None:
    for message in ("x" * 1_000_000, "half \ud800 a character"):
        with pytest.raises(ValueError, match=message[:10]), client.session() as s:
            raise ValueError(message)
        ended = proxy.sessions[s.id]
        assert ended["status"] == "failed"
        assert ended["error"] == f"ValueError: {message}"[:LONGEST_ERROR].replace("\ud800", "?")


def test_a_reward_sends_its_scope_and_idempotency_key(proxy: Any, client: Client) -> None:
    with client.session() as s:
        for _ in range(2):
            s.reward(1.0, "chatcmpl-1", scope="branch", source="me", idempotency_key="once")
    (reward,) = proxy.rewards
    assert (reward["scope"], reward["source"], reward["idempotency_key"]) == ("branch", "me", "once")


def test_a_session_beats_with_its_own_key_until_it_has_ended(proxy: Any, client: Client) -> None:
    with client.session() as s:
        assert s.heartbeat()
        assert proxy.history[-1] == (f"/sessions/{s.id}/heartbeat", {}, s.api_key)
    assert not s.heartbeat()


def test_a_sub_agent_gets_a_session_under_its_parent(proxy: Any, client: Client) -> None:
    with client.session() as s, s.child({"who": "sub"}) as sub:
        sub.reward(1.0)
    path, body, key = proxy.history[-1]
    assert (path, body) == ("/sessions", {"metadata": {"who": "sub"}, "parent_session_id": s.id})
    assert key == "run-key"
    assert proxy.rewards[0]["session_id"] == sub.id != s.id
    assert proxy.sessions[sub.id]["status"] == "completed"


def test_a_session_names_its_group_and_its_size(proxy: Any, client: Client) -> None:
    with client.session({"q": 1}, group="q1", group_size=8) as s:
        assert (s.group_id, s.sample_index) == ("g", 0)
    assert proxy.history[-1][1] == {"task": {"q": 1}, "group": "q1", "group_size": 8}


def test_an_agent_opens_sub_sessions_with_what_it_was_given(proxy: Any, client: Client) -> None:
    with client.session() as s, Client(s.base_url, s.api_key) as own, own.session() as sub:
        sub.reward(0.5)
    assert proxy.history[-1] == ("/sessions", {}, s.api_key)
    assert proxy.rewards[0]["session_id"] == sub.id


def test_a_block_that_raises_fails_its_session(proxy: Any, client: Client) -> None:
    with pytest.raises(ZeroDivisionError), client.session() as s:
        _ = 1 / 0
    assert proxy.sessions[s.id]["status"] == "failed"
    assert proxy.sessions[s.id]["error"] == "ZeroDivisionError: division by zero"


def test_the_client_waits_for_admission_and_reports_the_reason(proxy: Any) -> None:
    proxy.faults["/sessions"] = [refuse(429, "no_capacity", **{"retry-after": "60", "retry-after-ms": "10"})]
    waits: list[str] = []
    with (
        Client(proxy.url, "k", timeout_s=30, on_wait=lambda _, why: waits.append(why)) as client,
        client.session() as s,
    ):
        pass
    assert waits == ["no_capacity"]
    assert proxy.sessions[s.id]["status"] == "completed"


def test_waiting_is_bounded(proxy: Any, client: Client) -> None:
    proxy.faults["/sessions"] = [refuse(429, "no_capacity", **{"retry-after": "60"})]
    with pytest.raises(RequestError, match="no_capacity") as caught, client.session():
        pass
    assert caught.value.status == 429


def test_a_reward_survives_a_restarting_proxy_and_counts_once(proxy: Any, client: Client) -> None:
    with client.session() as s:
        proxy.faults["/sessions/{sid}/reward"] = [refuse(503, "starting"), refuse(502, "no_engine")]
        s.reward(1.0)
    assert len(proxy.rewards) == 1
    assert list(proxy.seen_keys.values()) == [1]


def test_refusals_are_not_retried(proxy: Any, client: Client) -> None:
    proxy.faults["/sessions"] = [refuse(401, "invalid_api_key")]
    with pytest.raises(RequestError) as caught, client.session():
        pass
    assert (caught.value.status, caught.value.code) == (401, "invalid_api_key")


def test_an_unreachable_proxy_is_an_error_after_the_timeout() -> None:
    with (
        Client("http://127.0.0.1:9", "k", timeout_s=0.3) as client,
        pytest.raises(RequestError, match="does not answer"),
        client.session(),
    ):
        pass


async def test_the_async_client_follows_the_same_rules(proxy: Any) -> None:
    proxy.faults["/sessions"] = [refuse(503, "starting")]
    async with AsyncClient(proxy.url, "k", timeout_s=30) as client, client.session() as s:
        assert await s.reward(1.0, "chatcmpl-1", scope="branch")
        assert await s.heartbeat()
        async with s.child() as sub:
            pass
    assert [proxy.sessions[i]["status"] for i in (s.id, sub.id)] == ["completed", "completed"]
    assert proxy.rewards[0]["scope"] == "branch"
    assert proxy.history[-1][1] == {"parent_session_id": s.id}


def test_the_blocking_client_is_generated_from_the_awaiting_one() -> None:
    generated = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, check=True).stdout
    written = Path(package.__file__).with_name("blocking.py").read_text()
    assert written == generated, "run: python scripts/blocking_client.py > agentrl/client/blocking.py"


def test_missing_settings_name_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AGENTRL_PROXY_URL", raising=False)
    monkeypatch.delenv("AGENTRL_RUN_KEY", raising=False)
    with pytest.raises(UserError, match="no proxy address: pass base_url or set AGENTRL_PROXY_URL"):
        Client(api_key="k")
    with pytest.raises(UserError, match="no run key: pass api_key or set AGENTRL_RUN_KEY"):
        Client("http://proxy")
