"""A start may be repeated: after a lost reply, at another replica, or by two at once, it is one start."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import httpx
import pytest
from databases import KINDS

from agentrl.client import Client

pytestmark = pytest.mark.parametrize("database_kind", KINDS)
RUN = {"Authorization": "Bearer run-key"}
ADMIN = {"Authorization": "Bearer admin-key"}


def again(key: str, who: dict[str, str] = RUN) -> dict[str, str]:
    return who | {"Idempotency-Key": key}


def place(answer: httpx.Response) -> dict[str, Any]:
    """A start's answer without the replica's address."""
    assert answer.status_code == 201, answer.text
    body: dict[str, Any] = answer.json()
    sessions = body.get("sessions", [body])
    keys = [(s["session_id"], s["api_key"], s["sample_index"]) for s in sessions]
    return {"group": body["group_id"], "task": body.get("task"), "keys": keys}


@pytest.mark.long_on("postgresql")
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/groups", {"owner": "w"}),
        ("/groups", {"is_eval": True, "task": {"q": 1}, "size": 3}),
        ("/sessions", {"task": {"q": 1}}),
    ],
)
def test_a_repeated_start_gets_the_same_sessions_and_keys(proxy, second, path, body):
    first = place(proxy.post(path, body, headers=again("k")))
    assert place(proxy.post(path, body, headers=again("k"))) == first
    assert place(second.post(path, body, headers=again("k"))) == first
    session_id, key, _ = first["keys"][-1]
    assert proxy.post(f"/sessions/{session_id}/heartbeat", headers={"x-api-key": key}).json() == {"status": "open"}
    assert sum(proxy.get("/api/run")["groups"].values()) == 1


@pytest.mark.long_on("postgresql")
def test_other_keys_other_bodies_and_other_callers_start_anew(proxy):
    asked = [
        ({}, again("one")),
        ({}, again("two")),
        ({"owner": "w"}, again("one")),
        ({}, again("one", ADMIN)),
    ]
    started = [place(proxy.post("/groups", body, headers=headers)) for body, headers in asked]
    assert len({s["group"] for s in started}) == 4
    assert len({key for s in started for _, key, _ in s["keys"]}) == 8


def test_without_a_key_every_start_is_new_and_its_keys_cannot_be_guessed(proxy):
    one, other = (place(proxy.post("/groups")) for _ in range(2))
    assert one["group"] != other["group"]
    assert not {key for _, key, _ in one["keys"]} & {key for _, key, _ in other["keys"]}


def test_concurrent_repeats_of_a_start_get_one_group(proxy, second):
    together = Barrier(6)

    def start(replica: Any) -> dict[str, Any]:
        together.wait(120)
        return place(replica.post("/groups", {}, headers=again("k")))

    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(start, [proxy, second] * 3))
    assert answers == [answers[0]] * 6
    run = proxy.get("/api/run")
    assert (run["admitted"], run["running"], run["groups"]) == (1, 1, {"running": 1})


def test_a_start_repeated_after_a_lost_reply_takes_one_place(proxy, monkeypatch):
    """The proxy starts the session and answers; the answer never arrives; the client asks again."""
    lost: list[dict[str, Any]] = []
    with Client(proxy.url, "run-key", timeout_s=20) as client:
        deliver = client._http.request

        def lossy(method: str, url: str, **kwargs: Any) -> httpx.Response:
            answer = deliver(method, url, **kwargs)
            if not lost and url == "/sessions":
                lost.append(place(answer))
                raise httpx.ReadError("connection reset")
            return answer

        monkeypatch.setattr(client._http, "request", lossy)
        with client.session(task={"q": 1}) as session:
            assert [(session.id, session.api_key, 0)] == lost[0]["keys"]
            assert session.heartbeat()
    assert proxy.get("/api/run")["admitted"] == 1


@pytest.mark.long_on("postgresql")
def test_a_key_that_is_too_long_is_refused_by_name(proxy):
    refused = proxy.post("/groups", headers=again("k" * 201))
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "Idempotency-Key")
    session = proxy.session()
    refused = proxy.post(f"/sessions/{session['session_id']}/reward", {"value": 1}, headers=again("k" * 201))
    assert refused.status_code == 400
