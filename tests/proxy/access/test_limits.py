"""Limits through the proxy: of a request's size and time, of calls at once, of what a session may use."""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import httpx
import openai
import pytest
from databases import KINDS

from agentrl.testing import Reply

ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
LIMITED = {
    "max_body_bytes": 20_000,
    "max_concurrent_calls_per_session": 2,
    "max_calls_per_session": 3,
}


@pytest.fixture
def run_config(run_config: dict[str, Any]) -> dict[str, Any]:
    return run_config | {"proxy": LIMITED}


@pytest.mark.parametrize("path", ["/sessions", "/groups", "/sessions/{id}/reward", "/v1/chat/completions"])
@pytest.mark.parametrize("chunked", [False, True])
def test_a_large_body_is_refused(proxy: Any, path: str, chunked: bool) -> None:
    session = proxy.session()
    url = proxy.url + path.format(id=session["session_id"])
    key = {"Authorization": f"Bearer {session['api_key'] if 'v1' in path else 'run-key'}"}
    body = b'{"metadata": {"x": "' + b"x" * 30_000 + b'"}}'
    content = (body[i : i + 1000] for i in range(0, len(body), 1000)) if chunked else body
    answer = proxy.http.post(url, content=content, headers=key | {"content-type": "application/json"})
    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "body_too_large"


def _drip(url: str, key: str, path: str) -> bytes:
    """Send a request whose body comes a byte at a time; all that is answered until the connection ends."""
    host, port = url.removeprefix("http://").split(":")
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\ncontent-length: 1000\r\n\r\n"
    said = b""
    with socket.create_connection((host, int(port))) as client, suppress(ConnectionError):
        client.sendall(head.encode())
        while True:
            if not select.select([client], [], [], 0.05)[0]:
                client.sendall(b"{")
            elif part := client.recv(65_536):
                said += part
            else:
                break
    return said


class TestSlowBodies:
    @pytest.fixture
    def run_config(self, run_config: dict[str, Any]) -> dict[str, Any]:
        return run_config | {"proxy": LIMITED | {"body_timeout_s": 0.5}}

    @pytest.mark.parametrize("path", ["/groups", "/v1/messages", "/v1/chat/completions"])
    def test_a_body_that_drips_is_refused_and_its_connection_closed(self, proxy: Any, path: str) -> None:
        key = "run-key" if path == "/groups" else proxy.session()["api_key"]
        said = _drip(proxy.url, key, path)
        assert said.startswith(b"HTTP/1.1 408 ")
        assert b"the body was not here after 0.5 s" in said


def test_an_unauthenticated_request_is_refused_before_its_body(proxy: Any) -> None:
    for path in ("/groups", "/v1/chat/completions", "/sessions/x/reward", "/api/keys"):
        with proxy.http.stream("POST", proxy.url + path, content=_endless(), headers={"x-api-key": "wrong"}) as answer:
            assert answer.status_code == 401, path


def _endless() -> Iterator[bytes]:
    yield b"{"
    threading.Event().wait(0.2)
    yield b"}"


def test_a_session_with_too_many_calls_under_way_is_told_to_wait(proxy: Any, until: Any) -> None:
    session = proxy.session()
    proxy.engine.enqueue(*(Reply(proxy.says("hello"), hold_after=1) for _ in range(2)))
    asked = [
        threading.Thread(target=proxy.post, args=("/v1/chat/completions", ASK), kwargs={"headers": bearer(session)})
        for _ in range(2)
    ]
    for thread in asked:
        thread.start()
    until(lambda: proxy.engine.holding == 2)
    answer = proxy.post("/v1/chat/completions", ASK, headers=bearer(session))
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "too_many_calls")
    assert answer.headers["retry-after"] == "1"
    for _ in asked:
        proxy.engine.release()
    for thread in asked:
        thread.join()
    assert proxy.post("/v1/chat/completions", ASK, headers=bearer(session)).status_code == 200


def bearer(session: dict[str, Any]) -> dict[str, str]:
    return {"Authorization": f"Bearer {session['api_key']}"}


def test_sdks_do_not_repeat_a_call_that_the_session_may_not_make(proxy: Any) -> None:
    session = proxy.session()
    for _ in range(3):
        assert proxy.post("/v1/chat/completions", ASK, headers=bearer(session)).status_code == 200
    sent: list[httpx.Request] = []
    with httpx.Client(event_hooks={"request": [sent.append]}) as http:
        client = openai.OpenAI(base_url=session["base_url"], api_key=session["api_key"], http_client=http)
        with pytest.raises(openai.PermissionDeniedError, match="3 of its 3 calls"):
            client.chat.completions.create(model="default", messages=ASK["messages"])
    assert len(sent) == 1
    answer = proxy.post("/v1/messages", {"model": "default", **ASK}, headers=bearer(session))
    assert (answer.status_code, answer.json()["error"]["type"]) == (403, "permission_error")
    assert proxy.post(f"/sessions/{session['session_id']}/reward", {"value": 1}).json()["applied"]


def test_a_call_that_was_refused_is_not_counted(proxy: Any) -> None:
    session = proxy.session()
    for _ in range(5):
        assert proxy.post("/v1/chat/completions", ASK | {"model": "x"}, headers=bearer(session)).status_code == 404
    for _ in range(3):
        assert proxy.post("/v1/chat/completions", ASK, headers=bearer(session)).status_code == 200


@pytest.mark.parametrize("database_kind", KINDS)
def test_the_calls_of_a_session_are_counted_over_replicas(proxy: Any, second: Any) -> None:
    session = proxy.session()
    for replica in (proxy, proxy, proxy):
        assert replica.post("/v1/chat/completions", ASK, headers=bearer(session)).status_code == 200
    assert second.post("/v1/chat/completions", ASK, headers=bearer(session)).status_code == 403


def sub_agent(replica: Any, parent: dict[str, Any]) -> dict[str, Any]:
    opened: dict[str, Any] = replica.post("/sessions", {}, headers=bearer(parent)).json()
    return opened


@pytest.mark.parametrize("database_kind", KINDS)
def test_a_sub_agents_calls_are_charged_to_its_root_over_replicas(proxy: Any, second: Any) -> None:
    root, other = proxy.session(), proxy.session()
    below = sub_agent(proxy, sub_agent(second, root))
    beside = sub_agent(second, root)
    for replica, session in ((proxy, root), (second, below), (proxy, beside)):
        assert replica.post("/v1/chat/completions", ASK, headers=bearer(session)).status_code == 200
    for replica, session in ((proxy, root), (second, below), (second, sub_agent(proxy, root))):
        answer = replica.post("/v1/chat/completions", ASK, headers=bearer(session))
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "session_limit_reached")
    assert proxy.post("/v1/chat/completions", ASK, headers=bearer(other)).status_code == 200


def test_calls_under_way_are_counted_over_a_session_and_its_sub_agents(proxy: Any, until: Any) -> None:
    root = proxy.session()
    family = [root, sub_agent(proxy, root)]
    proxy.engine.enqueue(*(Reply(proxy.says("hello"), hold_after=1) for _ in family))
    asked = [
        threading.Thread(target=proxy.post, args=("/v1/chat/completions", ASK), kwargs={"headers": bearer(session)})
        for session in family
    ]
    for thread in asked:
        thread.start()
    until(lambda: proxy.engine.holding == 2)
    answer = proxy.post("/v1/chat/completions", ASK, headers=bearer(sub_agent(proxy, root)))
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "too_many_calls")
    for _ in asked:
        proxy.engine.release()
    for thread in asked:
        thread.join()
