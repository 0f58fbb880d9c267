"""A run of ReMax: the proxy opens a greedy session with each group, and samples its calls at temperature 0."""

from __future__ import annotations

from typing import Any

import pytest
from databases import KINDS

pytestmark = pytest.mark.parametrize("database_kind", KINDS)
RUN = {"Authorization": "Bearer run-key"}


@pytest.fixture
def run_config(run_config: dict[str, Any]) -> dict[str, Any]:
    return run_config | {"rollout": {"group_size": 2}, "trainer": {"algorithm": "remax"}}


def temperatures(proxy: Any, session: dict[str, Any]) -> list[float]:
    """Of two calls, whose program asks for 0.7 and for nothing."""
    for asked in ({"temperature": 0.7}, {}):
        messages = [{"role": "user", "content": "ab"}]
        proxy.sdk(session).chat.completions.create(model="test", messages=messages, **asked)
    return [call["params"]["temperature"] for call in proxy.calls(session)]


@pytest.mark.long_on("postgresql")
def test_the_last_session_of_a_group_is_greedy_whatever_its_program_asks(proxy: Any, second: Any) -> None:
    opened = proxy.post("/groups", headers=RUN | {"Idempotency-Key": "g"}).json()["sessions"]
    again = second.post("/groups", headers=RUN | {"Idempotency-Key": "g"}).json()["sessions"]
    assert [s["is_baseline"] for s in opened] == [s["is_baseline"] for s in again] == [False, False, True]
    assert [s["api_key"] for s in opened] == [s["api_key"] for s in again]
    assert [temperatures(proxy, s) for s in opened] == [[1.0, 1.0], [1.0, 1.0], [0.0, 0.0]]
    assert temperatures(second, again[2]) == [0.0] * 4  # it has read the session from the store
    assert proxy.get(f"/sessions/{opened[2]['session_id']}")["is_baseline"]
    below = proxy.post("/sessions", {}, headers={"Authorization": f"Bearer {opened[2]['api_key']}"}).json()
    assert temperatures(proxy, below) == [0.0, 0.0]
    for session, value in zip(opened, (0.0, 1.0, 0.5), strict=True):
        path = f"/sessions/{session['session_id']}"
        assert proxy.post(f"{path}/reward", {"value": value}).status_code == 200
        assert proxy.post(f"{path}/end").status_code == 200
    run = proxy.get("/api/run")
    assert run["trajectories"]["rejected"] > 0
    assert run["trajectories"]["ready"] == 2 * 2


def test_an_evaluation_has_no_greedy_baseline(proxy: Any) -> None:
    opened = proxy.post("/groups", {"is_eval": True, "task": {}, "size": 2}).json()["sessions"]
    assert [s["is_baseline"] for s in opened] == [False, False]


def test_a_program_with_a_task_of_its_own_is_refused(proxy: Any) -> None:
    for body in ({"task": {"n": 1}}, {"task": {"n": 1}, "group": "mine"}):
        answer = proxy.post("/sessions", body)
        assert answer.status_code == 409
        assert answer.json()["error"]["code"] == "needs_greedy_episode"
        assert "POST /groups" in answer.json()["error"]["message"]
