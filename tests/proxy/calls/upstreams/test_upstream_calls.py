"""Other models beside the policy: passed on as they are, recorded before their end is delivered, never trained."""

import asyncio
import json
import logging
import threading
import time
from contextlib import suppress
from typing import Any

import anthropic
import httpx
import openai
import orjson
import pytest
from aiohttp import web
from run_records import create_run
from sqlalchemy import text

from agentrl.configs.config_files import parse_config
from agentrl.configs.proxy_config import UpstreamConfig
from agentrl.domain.selection import Selection
from agentrl.engine.server_process import free_port
from agentrl.errors import ConfigError
from agentrl.export.job import Job
from agentrl.proxy.calls.upstreams import upstream_models
from agentrl.store import Database, runs
from agentrl.store.audit import run_audit
from agentrl.store.upkeep import retention
from agentrl.testing import FakeEngine

HELLO = [{"role": "user", "content": "abcd"}]
KEY = "sk-very-secret-key"
RUN_KEY = {"Authorization": "Bearer run-key"}


class Judge:
    """Another model's server: `answer` says what it does; keeps what it got."""

    def __init__(self):
        self.port = free_port()
        self.answer = whole({"id": "j1", "choices": [{"finish_reason": "stop", "message": {"content": "good"}}]})
        self.got = []
        self.gate = threading.Event()
        self.gone = threading.Event()
        self._started = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        assert self._started.wait(120)

    def _serve(self):
        asyncio.set_event_loop(self._loop)
        app = web.Application()
        app.router.add_post("/{path:.*}", self._handle)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.01, access_log=None)
        self._loop.run_until_complete(runner.setup())
        self._loop.run_until_complete(web.TCPSite(runner, "127.0.0.1", self.port).start())
        self._started.set()
        self._loop.run_forever()
        self._loop.run_until_complete(runner.cleanup())
        self._loop.close()

    async def _handle(self, request):
        headers = {name.lower(): value for name, value in request.headers.items()}
        self.got.append((request.path, headers, await request.json()))
        try:
            return await self.answer(self, request)
        except asyncio.CancelledError:
            self.gone.set()
            raise

    async def opened(self):
        while not self.gate.is_set():  # noqa: ASYNC110  the test lives in another thread
            await asyncio.sleep(0.005)

    def stop(self):
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(120)


def whole(body, status=200, headers=None):
    async def answer(judge, request):
        return web.Response(body=orjson.dumps(body), status=status, headers=headers, content_type="application/json")

    return answer


def stream(*chunks, cut=False, wait_before=None):
    """Server-sent bytes as they are given; `cut` drops the connection, `wait_before` holds before that chunk."""

    async def answer(judge, request):
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for index, chunk in enumerate(chunks):
            if index == wait_before:
                await judge.opened()
            await response.write(chunk)
            await asyncio.sleep(0.002)
        if cut:
            request.transport.abort()
        return response

    return answer


def event(data, name=None):
    return (f"event: {name}\n" if name else "").encode() + b"data: " + orjson.dumps(data) + b"\n\n"


def chunk(content=None, finish_reason=None):
    delta = {} if content is None else {"role": "assistant", "content": content}
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
    return event({"id": "j1", "object": "chat.completion.chunk", "created": 0, "model": "gpt-x", "choices": [choice]})


STREAM = (chunk("go"), chunk("od"), chunk(None, "stop"), b"data: [DONE]\n\n")


@pytest.fixture
def judge():
    found = Judge()
    yield found
    found.stop()


@pytest.fixture
def run_limits():
    return {}


@pytest.fixture
def run_config(run_config, run_limits, judge, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", KEY)
    base = {"base_url": f"http://127.0.0.1:{judge.port}/v1", "api_key_env": "JUDGE_KEY", "model": "gpt-x"}
    known = {"judge": base, "nobody": {"base_url": f"http://127.0.0.1:{free_port()}/v1"}}
    return run_config | {"proxy": {"upstreams": known | {"hasty": base | {"timeout_s": 0.3}}} | run_limits}


def ask(proxy, session, model="judge", **options):
    return proxy.sdk(session).chat.completions.create(model=model, messages=HELLO, **options)


def upstream_calls(proxy, session):
    return [call for call in proxy.calls(session) if call["role"] == "upstream"]


def violations(proxy):
    with proxy.database.read() as conn:
        return list(run_audit.scan(conn, proxy.run_id))


def test_a_call_that_names_an_upstream_is_passed_on_and_recorded(proxy, judge):
    session = proxy.session()
    answer = ask(proxy, session, temperature=0.5, tools=[{"type": "custom", "x": 1}], extra_body={"odd": [2.50]})
    assert answer.choices[0].message.content == "good"
    ((path, headers, body),) = judge.got
    assert path == "/v1/chat/completions"
    assert headers["authorization"] == f"Bearer {KEY}"
    assert body == {
        "model": "gpt-x",
        "messages": HELLO,
        "temperature": 0.5,
        "tools": [{"type": "custom", "x": 1}],
        "odd": [2.5],
    }
    (call,) = proxy.calls(session)
    assert (call["role"], call["status"], call["trainable"]) == ("upstream", "complete", False)
    assert call["options"] == {"upstream": "judge", "model": "gpt-x"}
    assert call["new_messages"] == HELLO
    assert call["tools"] == [{"type": "custom", "x": 1}]
    assert call["params"] == {"temperature": 0.5, "odd": [2.5]}
    assert call["answer"]["choices"][0]["message"]["content"] == "good"
    assert call["output_ids"] == call["prompt_delta_ids"] == call["version_spans"] == []
    assert proxy.engine.requests == []


def test_the_answer_names_its_interaction_so_that_it_can_be_rewarded(proxy):
    session = proxy.session()
    answer = proxy.sdk(session).chat.completions.with_raw_response.create(model="judge", messages=HELLO)
    (call,) = proxy.calls(session)
    assert answer.headers["x-interaction-id"] == call["id"]
    reward = {"value": 1.0, "interaction_id": call["id"]}
    assert proxy.post(f"/sessions/{session['session_id']}/reward", reward).json()["applied"]


def test_a_stream_comes_as_it_is_and_ends_after_the_commit(proxy, judge):
    judge.answer = stream(*STREAM, wait_before=2)
    session = proxy.session()
    events = iter(ask(proxy, session, stream=True))
    assert next(events).choices[0].delta.content == "go"
    assert next(events).choices[0].delta.content == "od"
    assert [call["status"] for call in proxy.calls(session)] == ["running"]
    judge.gate.set()
    assert next(events).choices[0].finish_reason == "stop"
    (call,) = proxy.calls(session)
    assert (call["status"], call["finish_reason"]) == ("complete", "stop")
    assert [e if e == "[DONE]" else e["choices"][0]["delta"].get("content") for e in call["answer"]["events"]] == [
        "go",
        "od",
        None,
        "[DONE]",
    ]
    assert list(events) == []


TOOL_CALLS = [
    (
        "/chat/completions",
        {"choices": [{"delta": {"tool_calls": [{"index": 0, "function": {"name": "a", "arguments": ""}}]}}]},
        STREAM[2:],
    ),
    (
        "/messages",
        {"type": "content_block_start", "index": 1, "content_block": {"type": "tool_use", "name": "a", "input": {}}},
        [event({"type": "message_delta", "delta": {"stop_reason": "tool_use"}}), event({"type": "message_stop"})],
    ),
    (
        "/responses",
        {"type": "response.output_item.added", "item": {"type": "function_call", "name": "a", "arguments": ""}},
        [event({"type": "response.completed", "response": {"status": "completed"}})],
    ),
]


@pytest.mark.parametrize(("path", "data", "end"), TOOL_CALLS, ids=["chat", "messages", "responses"])
def test_a_tool_call_is_relayed_after_the_commit(proxy, judge, path, data, end):
    """However its stream goes on: an agent may act on a call whose arguments are whole."""
    judge.answer = stream(chunk("go"), event(data), chunk("on"), *end, wait_before=3)
    session = proxy.session()
    body = {"model": "judge", "messages": HELLO, "stream": True}
    with proxy.http.stream("POST", session["base_url"] + path, json=body, headers=bearer(session)) as got:
        pieces = got.iter_raw()
        assert next(pieces) == chunk("go")
        judge.gate.set()
        rest = next(pieces)
        assert rest.startswith(event(data))
        assert [call["status"] for call in proxy.calls(session)] == ["complete"]


@pytest.mark.parametrize("size", [1, 3, 10_000])
def test_streamed_bytes_are_relayed_however_they_are_cut(proxy, judge, size):
    sent = b"".join(STREAM).replace(b"\n", b"\r\n") + b": bye\n\n"
    judge.answer = stream(*(sent[i : i + size] for i in range(0, len(sent), size)))
    session = proxy.session()
    body = {"model": "judge", "messages": HELLO, "stream": True}
    got = proxy.http.post(session["base_url"] + "/chat/completions", json=body, headers=bearer(session))
    assert got.content == sent.removesuffix(b": bye\n\n")
    assert len(upstream_calls(proxy, session)[0]["answer"]["events"]) == 4


def bearer(session):
    return {"Authorization": f"Bearer {session['api_key']}"}


@pytest.mark.parametrize(("status", "headers"), [(400, {}), (404, {}), (429, {"Retry-After": "7"}), (500, {})])
@pytest.mark.parametrize("streamed", [False, True])
def test_an_error_keeps_its_status_and_body(proxy, judge, status, headers, streamed):
    judge.answer = whole({"error": {"message": "no", "code": "odd"}}, status, headers)
    session = proxy.session()
    with pytest.raises(openai.APIStatusError) as caught:
        ask(proxy, session, stream=streamed)
    assert caught.value.status_code == status
    assert caught.value.body == {"message": "no", "code": "odd"}
    assert caught.value.response.headers.get("retry-after") == headers.get("Retry-After")
    (call,) = proxy.calls(session)
    assert call["status"] == "failed"
    assert str(status) in call["error"]
    assert violations(proxy) == []


def test_an_upstream_that_is_down_is_a_502_by_name(proxy):
    session = proxy.session()
    with pytest.raises(openai.InternalServerError, match="nobody failed") as caught:
        ask(proxy, session, "nobody")
    assert caught.value.status_code == 502
    assert [call["status"] for call in proxy.calls(session)] == ["failed"]


def test_an_upstream_that_is_slow_is_a_504(proxy, judge):
    async def never(judge, request):
        await judge.opened()

    judge.answer = never
    session = proxy.session()
    with pytest.raises(openai.InternalServerError, match="did not answer in") as caught:
        ask(proxy, session, "hasty")
    assert caught.value.status_code == 504
    assert [call["status"] for call in proxy.calls(session)] == ["failed"]


@pytest.mark.parametrize(
    ("sent", "cut"),
    [(STREAM[:2], True), (STREAM[:2], False), ((*STREAM[:2], event({"error": {"message": "overloaded"}})), False)],
)
def test_a_stream_that_breaks_off_ends_with_an_error_and_is_recorded_as_failed(proxy, judge, sent, cut):
    judge.answer = stream(*sent, cut=cut)
    session = proxy.session()
    with pytest.raises(openai.APIError):
        list(ask(proxy, session, stream=True))
    assert [call["status"] for call in proxy.calls(session)] == ["failed"]
    assert violations(proxy) == []


def test_a_stream_that_breaks_off_before_its_first_event_is_a_502(proxy, judge):
    judge.answer = stream(cut=True)
    with pytest.raises(openai.InternalServerError):
        ask(proxy, proxy.session(), stream=True)


@pytest.mark.parametrize("body", ["no object", [1], None])
def test_an_answer_that_is_no_object_is_a_502(proxy, judge, body):
    judge.answer = whole(body)
    session = proxy.session()
    with pytest.raises(openai.InternalServerError, match="did not answer with a JSON object"):
        ask(proxy, session)
    assert [call["status"] for call in proxy.calls(session)] == ["failed"]


def test_redirects_are_not_followed(proxy, judge):
    judge.answer = whole({}, 307, {"Location": "/elsewhere"})
    with pytest.raises(openai.InternalServerError, match="redirects"):
        ask(proxy, proxy.session())
    assert len(judge.got) == 1


async def leave_once(condition, url, **request):
    """Send a request, and close its connection when the condition is met."""
    async with httpx.AsyncClient(timeout=120) as http:
        asking = asyncio.create_task(http.post(url, **request))
        while not condition():  # noqa: ASYNC110  the upstream lives in another thread
            await asyncio.sleep(0.005)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking


@pytest.mark.parametrize("streamed", [False, True])
def test_a_client_that_leaves_aborts_the_call(proxy, judge, until, streamed):
    async def never(judge, request):
        await judge.opened()

    judge.answer = stream(*STREAM, wait_before=1) if streamed else never
    session = proxy.session()
    body = {"model": "judge", "messages": HELLO, "stream": streamed}
    url = session["base_url"] + "/chat/completions"
    if streamed:
        with proxy.http.stream("POST", url, json=body, headers=bearer(session)):
            pass
    else:
        asyncio.run(leave_once(lambda: judge.got, url, json=body, headers=bearer(session)))
    until(lambda: [call["status"] for call in proxy.calls(session)] == ["aborted"])
    assert judge.gone.wait(120)


def test_every_dialect_reaches_its_own_path(proxy, judge):
    session = proxy.session()
    messages = anthropic.Anthropic(
        base_url=session["base_url"].removesuffix("/v1"), api_key=session["api_key"], max_retries=0
    )
    judge.answer = whole(
        {
            "id": "m",
            "type": "message",
            "role": "assistant",
            "model": "claude",
            "stop_reason": "end_turn",
            "content": [{"type": "text", "text": "good"}],
            "usage": {"input_tokens": 1, "output_tokens": 1},
        }
    )
    answer = messages.messages.create(model="judge", max_tokens=5, messages=HELLO, system="be short")
    assert answer.content[0].text == "good"
    judge.answer = whole({"id": "r", "object": "response", "status": "completed", "output": []})
    proxy.sdk(session).responses.create(model="judge", input="abcd", instructions="be short")
    judge.answer = whole({"id": "c", "choices": [{"text": "x", "finish_reason": "length"}]})
    proxy.sdk(session).completions.create(model="judge", prompt="abcd")
    assert [path for path, _, _ in judge.got] == ["/v1/messages", "/v1/responses", "/v1/completions"]
    assert judge.got[0][1]["x-api-key"] == KEY
    assert judge.got[0][1]["anthropic-version"]
    assert "authorization" not in judge.got[0][1]
    calls = proxy.calls(session)
    assert [call["finish_reason"] for call in calls] == ["end_turn", "completed", "length"]
    assert [call["dialect"] for call in calls] == ["anthropic.messages", "openai.responses", "openai.completions"]
    assert [call["new_messages"] for call in calls] == [HELLO] * 3
    assert calls[0]["params"]["system"] == "be short"


def test_streams_of_the_other_dialects_are_held_back_from_their_ends(proxy, judge):
    session = proxy.session()
    events: list[dict[str, Any]] = [
        {"type": "message_start", "message": {"stop_reason": None}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "good"}},
        {"type": "message_delta", "delta": {"stop_reason": "max_tokens"}, "usage": {"output_tokens": 1}},
        {"type": "message_stop"},
    ]
    judge.answer = stream(*(event(e, e["type"]) for e in events))
    url = session["base_url"].removesuffix("/v1")
    body = {"model": "judge", "messages": HELLO, "stream": True}
    got = proxy.http.post(f"{url}/v1/messages", json=body, headers=bearer(session))
    assert got.content == b"".join(event(e, e["type"]) for e in events)
    events = [
        {"type": "response.created", "response": {"status": "in_progress"}},
        {"type": "response.completed", "response": {"status": "completed"}},
    ]
    judge.answer = stream(*(event(e, e["type"]) for e in events))
    proxy.http.post(f"{url}/v1/responses", json=body, headers=bearer(session))
    assert [call["finish_reason"] for call in proxy.calls(session)] == ["max_tokens", "completed"]


@pytest.mark.parametrize("path", ["/chat/completions", "/messages", "/responses", "/completions"])
@pytest.mark.parametrize(
    "body", [b'{"model": "judge", "x": [', b'{"model": "judge", "x": %s}' % (b"[" * 300 + b"]" * 300)]
)
def test_what_cannot_be_recorded_is_not_passed_on(proxy, judge, path, body):
    session = proxy.session()
    got = proxy.http.post(session["base_url"] + path, content=body, headers=bearer(session))
    assert got.status_code == 400, got.text
    assert judge.got == []
    assert proxy.calls(session) == []


def test_the_policy_is_sampled_unchanged_beside_a_judge(proxy):
    """The judge's calls are in no trajectory, and do not come between the turns of the policy."""
    group = proxy.post("/groups").json()["sessions"]
    for session in group:
        messages = list(HELLO)
        for _ in range(3):
            answer = proxy.sdk(session).chat.completions.create(model="test", messages=messages)
            ask(proxy, session)
            messages += [answer.choices[0].message.model_dump(), {"role": "user", "content": "c"}]
        proxy.post(f"/sessions/{session['session_id']}/reward", {"value": 1.0})
        proxy.post(f"/sessions/{session['session_id']}/end")
        roles = [(call["role"], call["bridged"], call["fork_reason"]) for call in proxy.calls(session)]
        asked = ("upstream", False, None)
        assert roles == [("main", False, None), asked, ("main", True, None), asked, ("main", True, None), asked]
    with proxy.database.read() as conn:
        paths = conn.execute(text("SELECT trajectory_id, count(*) FROM trajectory_interactions GROUP BY 1")).all()
        assert [count for _, count in paths] == [3, 3]
    assert violations(proxy) == []


def test_a_session_that_only_asked_a_judge_trains_nothing(proxy):
    group = proxy.post("/groups").json()["sessions"]
    for session in group:
        ask(proxy, session)
        proxy.post(f"/sessions/{session['session_id']}/reward", {"value": 1.0})
        proxy.post(f"/sessions/{session['session_id']}/end")
    with proxy.database.read() as conn:
        assert conn.execute(text("SELECT count(*) FROM trajectories")).scalar_one() == 0
    assert violations(proxy) == []


def test_a_sealed_session_refuses_upstream_calls(proxy, judge):
    session = proxy.session()
    proxy.post(f"/sessions/{session['session_id']}/end")
    with pytest.raises(openai.ConflictError):
        ask(proxy, session)
    assert judge.got == []


@pytest.mark.parametrize("run_limits", [{"max_concurrent_calls_per_session": 1, "max_calls_per_session": 3}])
def test_upstream_calls_count_against_the_limits_of_their_session(proxy, judge, until):
    session, other = proxy.session(), proxy.session()
    judge.answer = stream(*STREAM, wait_before=1)
    events = iter(ask(proxy, session, stream=True))
    next(events)
    for model in ("default", "judge"):
        with pytest.raises(openai.RateLimitError, match="1 calls under way, of 1"):
            ask(proxy, session, model)
    ask(proxy, other, "default")
    judge.gate.set()
    assert len(list(events)) == 2

    def answered():  # the place is free once the proxy has sent the end
        with suppress(openai.RateLimitError):
            return ask(proxy, session, "default")

    until(answered)
    judge.answer = whole({"error": {"message": "no"}}, 400)
    with pytest.raises(openai.BadRequestError):
        ask(proxy, session)
    for model in ("judge", "default"):
        with pytest.raises(openai.PermissionDeniedError, match="3 of its 3 calls"):
            ask(proxy, session, model)
    assert len(judge.got) == 2


@pytest.mark.parametrize("run_limits", [{"max_body_bytes": 20_000}])
@pytest.mark.parametrize("streamed", [False, True])
def test_an_upstream_answer_over_the_body_limit_is_cut_off(proxy, judge, streamed):
    session = proxy.session()
    if streamed:
        judge.answer = stream(STREAM[0], b"data: " + b"x" * 30_000)
    else:
        judge.answer = whole({"choices": [{"finish_reason": "stop", "message": {"content": "x" * 30_000}}]})
    with pytest.raises(openai.APIError, match="answered more than 20000 bytes"):
        list(ask(proxy, session, stream=streamed))
    (call,) = proxy.calls(session)
    assert call["status"] == "failed"


@pytest.mark.parametrize("run_limits", [{"max_tokens_per_session": 50}])
@pytest.mark.parametrize("streamed", [False, True])
def test_tokens_reported_by_an_upstream_count_for_the_root_session(proxy, judge, streamed):
    root = proxy.session()
    sub = proxy.post("/sessions", {"parent_session_id": root["session_id"]}).json()
    usage = {"usage": {"prompt_tokens": 1000, "completion_tokens": 40}}
    answered = {"id": "j", "choices": [{"finish_reason": "stop", "message": {"content": "good"}}]}
    events = (STREAM[0], event({"id": "j", "choices": [], **usage}), *STREAM[1:])
    judge.answer = stream(*events) if streamed else whole(answered | usage)
    for session in (root, sub):
        answer = ask(proxy, session, stream=streamed)
        if streamed:
            list(answer)
    for session in (root, sub):
        with pytest.raises(openai.PermissionDeniedError, match="80 of its 50 tokens"):
            ask(proxy, session, "default")
    with proxy.database.read() as conn:
        assert list(run_audit.scan(conn, proxy.run_id)) == []


@pytest.mark.parametrize("run_limits", [{"max_calls_per_session": 1}])
def test_an_upstream_call_that_never_began_does_not_count(proxy):
    session = proxy.session()
    for _ in range(2):
        bad = proxy.http.post(
            session["base_url"] + "/chat/completions",
            content=b'{"model": "judge", "x": 1e999}',
            headers={"Authorization": f"Bearer {session['api_key']}"},
        )
        assert (bad.status_code, bad.json()["error"]["code"]) == (400, "invalid_json")
    assert ask(proxy, session).choices[0].message.content == "good"


def test_the_key_is_in_no_table_log_or_answer(proxy, judge, caplog):
    session = proxy.session()
    caplog.set_level(logging.DEBUG)
    judge.answer = whole({"error": {"message": f"bad key {KEY}"}}, 401)
    with pytest.raises(openai.AuthenticationError) as caught:
        ask(proxy, session)
    judge.answer = whole({"choices": [], "echo": KEY})
    ask(proxy, session)
    judge.answer = stream(chunk(KEY), *STREAM)
    said = "".join(e.choices[0].delta.content or "" for e in ask(proxy, session, stream=True))
    said += str(caught.value) + json.dumps(proxy.calls(session), default=str) + str(proxy.get("/api/run"))
    with proxy.database.read() as conn:
        for table in ("runs", "sessions", "interactions", "events", "engines"):
            said += str(conn.execute(text(f"SELECT * FROM {table}")).all())
    assert KEY not in said + caplog.text
    assert "bad key [key]" in str(caught.value)


def test_another_run_of_ours_can_be_the_judge(proxy, databases, tiny_model, serve, monkeypatch):
    """A proxy with its own database and engine is an upstream like any other."""
    port, session = free_port(), None
    with databases.lent("sqlite") as url, FakeEngine() as engine:
        database = Database(url)
        known = {"judge": {"base_url": proxy.url + "/v1", "model": "default", "api_key_env": "FIRST_KEY"}}
        with database.write() as conn:
            create_run(
                conn,
                base_model=tiny_model,
                config={"name": "test", "model": "tiny", "agent": "a:B", "tasks": "t", "proxy": {"upstreams": known}},
            )
        first = proxy.session()
        monkeypatch.setenv("FIRST_KEY", first["api_key"])
        with serve(url, [engine.url], port):
            opened = proxy.http.post(f"http://127.0.0.1:{port}/groups", json={}, headers=RUN_KEY).json()
            session = opened["sessions"][0]
            ids = proxy.says("good")
            proxy.engine.enqueue(ids, ids)
            assert ask(proxy, session).choices[0].message.content == "good"
            said = [e.choices[0].delta.content or "" for e in ask(proxy, session, stream=True)]
            assert "".join(said) == "good"
            trace = proxy.http.get(
                f"http://127.0.0.1:{port}/sessions/{session['session_id']}/trace", headers=RUN_KEY
            ).json()
        database.close()
    assert [call["role"] for call in trace["calls"]] == ["upstream"] * 2
    assert [call["output_ids"] for call in proxy.calls(first)] == [ids, ids]


def test_upstream_calls_are_exported_and_pruned_with_their_group(proxy, tmp_path):
    for session in proxy.post("/groups").json()["sessions"]:
        ask(proxy, session)
        proxy.post(f"/sessions/{session['session_id']}/end")
    with proxy.database.read() as conn:
        run = runs.by_name(conn, "test")
    out = tmp_path / "calls.jsonl"
    Job(database=proxy.database, run=run, selection=Selection(what="interactions"), format="jsonl", out=out).execute(
        lambda done, total: None
    )
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["role"], row["answer"]["id"]) for row in rows] == [("upstream", "j1")] * 2
    pruned = retention.prune(proxy.database, proxy.run_id, time.time() + 60)
    assert (pruned.rows["interactions"], pruned.rows["interaction_data"]) == (2, 2)
    assert violations(proxy) == []


def test_a_missing_key_is_named_before_anything_serves(monkeypatch):
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    config = UpstreamConfig(base_url="http://h/v1", api_key_env="NO_SUCH_KEY")
    with pytest.raises(ConfigError, match=r"proxy\.upstreams\.judge\.api_key_env.*NO_SUCH_KEY"):
        upstream_models.from_config({"judge": config})


@pytest.mark.parametrize(
    ("upstreams", "complaint"),
    [
        ({"test": {"base_url": "http://h/v1"}}, "the name is reserved for the policy"),
        ({"default": {"base_url": "http://h/v1"}}, "the name is reserved for the policy"),
        ({"a b": {"base_url": "http://h/v1"}}, "proxy.upstreams.a b"),
        ({"judge": {"base_url": "h/v1"}}, "must be http"),
        ({"judge": {"base_url": "http://me:secret@h/v1"}}, "use api_key_env"),
        ({"judge": {"base_url": "http://h/v1?key=x"}}, "without a query"),
        ({"judge": {"base_url": "http://h/v1", "timeout_s": 0}}, "proxy.upstreams.judge.timeout_s"),
        ({"judge": {"base_url": "http://h/v1", "modell": "x"}}, "did you mean 'model'"),
    ],
)
def test_a_wrong_upstream_is_refused_by_name(upstreams, complaint):
    config = {"name": "test", "model": "tiny", "agent": "a:B", "tasks": "t", "proxy": {"upstreams": upstreams}}
    with pytest.raises(ConfigError, match=complaint) as caught:
        parse_config(config)
    assert "secret" not in str(caught.value)
