"""Calls to other models: passed on and recorded unchanged, never trained."""

import asyncio
import json
import logging
import time

import anthropic
import httpx
import openai
import pytest
from run_records import create_run
from sqlalchemy import text

from agentrl.domain.selection import Selection
from agentrl.engine.server_process import free_port
from agentrl.export.job import Job
from agentrl.store import Database, runs
from agentrl.store.upkeep import retention
from agentrl.testing import FakeEngine

from .judge_server import HELLO, KEY, RUN_KEY, STREAM, ask, bearer, chunk, stream, violations, whole


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


@pytest.mark.parametrize("path", ["/chat/completions", "/messages", "/responses", "/completions"])
@pytest.mark.parametrize(
    "body", [b'{"model": "judge", "x": [', b'{"model": "judge", "x": %s}' % (b"[" * 300 + b"]" * 300)]
)
def test_a_request_that_cannot_be_recorded_is_not_passed_on(proxy, judge, path, body):
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
