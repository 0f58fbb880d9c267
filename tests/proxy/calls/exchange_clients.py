"""Clients that send a request and leave, retry it, or read its answer."""

from __future__ import annotations

import socket
from contextlib import contextmanager

import httpx
import orjson

from agentrl.store.audit import run_audit
from agentrl.testing import Reply

BODY = {"messages": [{"role": "user", "content": "ab"}]}
RETRY = {"x-stainless-retry-count": "1"}
KEY = {"Idempotency-Key": "k"}


@contextmanager
def connected(session, body, path="/chat/completions", url=None, **headers):
    """A client that has sent its request; it leaves at the end of the block, or reads by the file it is given."""
    url = httpx.URL(url or session["base_url"])
    raw = orjson.dumps(body)
    told = {
        "host": f"{url.host}:{url.port}",
        "x-api-key": session["api_key"],
        "content-type": "application/json",
        "content-length": str(len(raw)),
        "connection": "close",
    } | headers
    head = f"POST {url.path.rstrip('/')}{path} HTTP/1.1\r\n" + "".join(f"{k}: {v}\r\n" for k, v in told.items())
    with socket.create_connection((url.host, url.port)) as client:
        client.sendall(head.encode() + b"\r\n" + raw)
        with client.makefile("rb") as lines:
            yield lines


def leave(proxy, session, until, body=BODY, **headers):
    """A client leaves while the engine samples its answer."""
    before = proxy.engine.holding
    with connected(session, body, **headers):
        until(lambda: proxy.engine.holding == before + 1)
    until(lambda: [call["delivery"] for call in proxy.calls(session)][-1] == "free")


def post(proxy, session, body=BODY, *, headers=RETRY, path="/chat/completions", url=None):
    told = {"Authorization": f"Bearer {session['api_key']}"} | headers
    answer = proxy.http.post((url or session["base_url"]) + path, json=body, headers=told)
    assert answer.status_code == 200, answer.text
    return answer


def text_of(answer):
    """The content of an answer, whole or streamed."""
    if not answer.headers["content-type"].startswith("text/event-stream"):
        return answer.json()["choices"][0]["message"]["content"]
    events = [orjson.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    return "".join(event["choices"][0]["delta"].get("content") or "" for event in events if event["choices"])


def release(proxy, count):
    for _ in range(count):
        proxy.engine.release()


def of_calls(proxy, session, field):
    return [call[field] for call in proxy.calls(session)]


def left_complete(proxy, session, until, body=BODY):
    """An answer that was recorded after its client had left."""
    proxy.engine.enqueue(Reply(proxy.says("hello"), hold_after=0))
    leave(proxy, session, until, body)
    proxy.engine.release()
    until(lambda: of_calls(proxy, session, "status") == ["complete"])


def violations(proxy):
    with proxy.database.read() as conn:
        return list(run_audit.scan(conn, proxy.run_id))
