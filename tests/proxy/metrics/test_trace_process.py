"""Spans of a real proxy's sessions: whole trees, once, whatever becomes of the receiver, the sender or a proxy."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
from databases import KINDS
from span_receiver import SpanReceiver

from agentrl.engine.server_process import free_port
from agentrl.errors import ConfigError
from agentrl.proxy.metrics import trace_process
from agentrl.testing import Reply

HOSTILE = "\x1b[2J\u202e<script>&'\"\\{{7*7}} \U0001f600 " + "ü" * 40
CONTENTS = ("gen_ai.system_instructions", "gen_ai.input.messages", "gen_ai.output.messages", "agentrl.answer")


@pytest.fixture
def receiver() -> Iterator[SpanReceiver]:
    with SpanReceiver() as made:
        yield made


@pytest.fixture
def traces() -> dict[str, Any]:
    """Settings besides the receiver; a test may have others."""
    return {}


@pytest.fixture
def run_config(run_config, receiver, traces, monkeypatch):
    monkeypatch.setattr(trace_process, "LOOK_EVERY_S", 0.05)
    monkeypatch.setenv("SPAN_HEADERS", "authorization=Bearer%20span-key,x-team=a")
    config = {"endpoint": receiver.url, "headers_env": "SPAN_HEADERS", "timeout_s": 5.0, **traces}
    many = {"rollout": {"group_size": 2, "max_concurrent_groups": 10_000}, "trainer": {"groups_per_step": 10_000}}
    return run_config | many | {"metrics": {"traces": config}}


def play(proxy: Any, text: str = "ab", **fields: Any) -> str:
    """One session with one call and a reward; returns its id."""
    session = proxy.session()
    path = f"/sessions/{session['session_id']}"
    answer = proxy.post(f"{path}/v1/chat/completions", {"messages": [{"role": "user", "content": text}], **fields})
    assert answer.status_code == 200, answer.text
    proxy.post(f"{path}/reward", {"value": 1.0})
    assert proxy.post(f"{path}/end").json()["status"] == "completed"
    return str(session["session_id"])


def sessions(receiver: SpanReceiver) -> list[str]:
    return sorted(span["agentrl.session.id"] for span in receiver.named("invoke_agent"))


def unsent(proxy: Any) -> int:
    line = next(line for line in proxy.metrics_text().splitlines() if line.startswith("agentrl_traces_unsent "))
    return int(line.split()[1])


def senders(proxy: Any) -> list[psutil.Process]:
    """The processes that send spans of this test's run."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            sends = "spans" in process.cmdline() and process.cmdline()[0].endswith("python")
            if sends and "guard.py" not in " ".join(process.cmdline()):
                found.append(process)
        except psutil.Error:
            continue
    return found


@pytest.mark.long_on("postgresql")
@pytest.mark.parametrize("database_kind", KINDS)
def test_a_tree_of_sessions_is_one_trace(proxy, receiver, until):
    parent = proxy.session()
    path = f"/sessions/{parent['session_id']}"
    child = proxy.post("/sessions", {"parent_session_id": parent["session_id"]}).json()
    messages = [{"role": "user", "content": "ab"}]
    first = proxy.post(f"{path}/v1/chat/completions", {"messages": messages, "temperature": 0.5, "seed": 3}).json()
    messages += [first["choices"][0]["message"], {"role": "user", "content": "more"}]
    proxy.post(f"{path}/v1/chat/completions", {"messages": messages, "max_tokens": 7})
    below = proxy.post(f"/sessions/{child['session_id']}/v1/completions", {"prompt": "x"}).json()
    proxy.post(f"{path}/reward", {"value": 0.25, "interaction_id": first["id"], "name": "turn"})
    proxy.post(f"{path}/reward", {"value": 1.0})
    proxy.post(f"{path}/end")
    until(lambda: len(receiver.spans) == 5 and unsent(proxy) == 0)
    root, sub = (
        next(s for s in receiver.spans if s["agentrl.session.id"] == one["session_id"]) for one in (parent, child)
    )
    assert (root["name"], root["parent_id"], root["gen_ai.operation.name"]) == (
        "invoke_agent a:B",
        None,
        "invoke_agent",
    )
    assert sub["parent_id"] == root["span_id"]
    assert {span["trace_id"] for span in receiver.spans} == {parent["session_id"]}
    assert root["resource"]["agentrl.run.name"] == "test"
    assert (root["agentrl.reward.reward"], root["agentrl.return"], root["agentrl.calls"]) == (1.0, 1.25, 2)
    calls = {span["gen_ai.response.id"]: span for span in receiver.spans if "gen_ai.response.id" in span}
    one, two = calls.pop(first["id"]), next(span for span in receiver.named("chat") if "agentrl.call.parent_id" in span)
    assert two["agentrl.call.parent_id"] == one["agentrl.call.id"]
    assert one["parent_id"] == two["parent_id"] == root["span_id"]
    assert calls[below["id"]]["parent_id"] == sub["span_id"]
    assert calls[below["id"]]["name"] == "text_completion test"
    engine = proxy.engine.url.rsplit(":", 1)
    expected = {
        "name": "chat test",
        "kind": "client",
        "error": None,
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "sglang",
        "gen_ai.conversation.id": parent["session_id"],
        "gen_ai.request.model": "test",
        "gen_ai.request.temperature": 1.0,  # the run forces its own
        "gen_ai.request.seed": 3,
        "gen_ai.response.model": "test",
        "gen_ai.response.finish_reasons": ["stop"],
        "gen_ai.usage.input_tokens": first["usage"]["prompt_tokens"],
        "gen_ai.usage.output_tokens": first["usage"]["completion_tokens"],
        "server.address": engine[0].removeprefix("http://"),
        "server.port": int(engine[1]),
        "agentrl.weight_version.min": 0,
        "agentrl.reward.turn": 0.25,
        "agentrl.dialect": "openai.chat",
    }
    assert {name: one.get(name) for name in expected} == expected
    assert two["gen_ai.request.max_tokens"] == 7
    assert 0 <= one["gen_ai.response.time_to_first_chunk"] <= one["end"] - one["start"]
    assert root["start"] <= one["start"] <= one["end"] <= root["end"] + 1
    assert not any(name in span for span in receiver.spans for name in CONTENTS)
    assert receiver.requests[0]["Authorization"] == "Bearer span-key"
    assert receiver.requests[0]["x-team"] == "a"


def test_a_forked_call_names_its_reason_and_a_failed_one_its_error(proxy, receiver, until):
    session = proxy.session()
    path = f"/sessions/{session['session_id']}"
    chat = f"{path}/v1/chat/completions"
    proxy.post(chat, {"messages": [{"role": "user", "content": "ab"}]})
    proxy.post(chat, {"messages": [{"role": "user", "content": "cd"}]})
    proxy.engine.enqueue(Reply(proxy.says("ab"), omit=frozenset({"output_token_logprobs"})))
    assert proxy.post(chat, {"messages": [{"role": "user", "content": "ab"}]}).status_code == 502
    proxy.post(f"{path}/end", {"status": "failed", "error": HOSTILE})
    until(lambda: len(receiver.spans) == 4)
    (root,) = receiver.named("invoke_agent")
    assert root["error.type"] == "failed"
    assert "<script>" in root["error"]
    failed = next(span for span in receiver.named("chat") if span["agentrl.call.status"] == "failed")
    assert failed["error.type"] == "failed"
    assert failed["error"]
    assert "gen_ai.response.id" not in failed
    assert "new_conversation" in [span.get("agentrl.fork_reason") for span in receiver.named("chat")]


@pytest.mark.long
@pytest.mark.parametrize("traces", [{"contents": True, "max_content_bytes": 200}])
def test_contents_are_bounded_and_hostile_text_arrives(proxy, receiver, until):
    session = proxy.session()
    path = f"/sessions/{session['session_id']}"
    proxy.engine.enqueue(proxy.says("ab"))
    system = {"role": "system", "content": HOSTILE}
    long = {"role": "user", "content": HOSTILE * 1000}
    assert proxy.post(f"{path}/v1/chat/completions", {"messages": [system, long]}).status_code in (200, 400)
    answer = proxy.post(f"{path}/v1/chat/completions", {"messages": [system, {"role": "user", "content": HOSTILE}]})
    assert answer.status_code == 200, answer.text
    proxy.post(f"{path}/reward", {"value": 1.0, "name": "a\x1b[2J"})
    proxy.post(f"{path}/end")
    until(lambda: receiver.named("invoke_agent") and receiver.named("chat"))
    call = next(span for span in receiver.named("chat") if span["agentrl.call.id"] in answer.json()["id"])
    (said,) = json.loads(call["gen_ai.input.messages"])
    assert said["role"] == "user"
    assert said["parts"][0]["content"] == HOSTILE
    assert json.loads(call["gen_ai.system_instructions"]) == [{"type": "text", "content": HOSTILE}]
    (reply,) = json.loads(call["gen_ai.output.messages"])
    assert reply["finish_reason"] == "stop"
    assert all(len(span[name]) < 500 for span in receiver.spans for name in CONTENTS if name in span)


@pytest.mark.long
def test_a_receiver_that_is_down_or_slow_delays_no_call_and_loses_nothing(proxy, receiver, until):
    receiver.free.clear()  # requests hang
    played = [play(proxy)]
    until(lambda: receiver.requests)
    began = time.monotonic()
    played += [play(proxy) for _ in range(5)]
    assert time.monotonic() - began < 5.0
    assert unsent(proxy) == 6
    receiver.stop()
    played.append(play(proxy))
    receiver.free.set()
    receiver.start()
    until(lambda: unsent(proxy) == 0)
    assert sessions(receiver) == sorted(played)


@pytest.mark.long_on("postgresql")
@pytest.mark.parametrize("database_kind", KINDS)
def test_sessions_that_end_while_no_sender_lives_are_sent_later(
    store_url, fake_engine, start, receiver, tiny_model, until
):
    receiver.stop()
    with start(store_url, fake_engine, tiny_model) as proxy:
        played = [play(proxy) for _ in range(3)]
    receiver.start()
    with start(store_url, fake_engine, tiny_model) as proxy:
        until(lambda: unsent(proxy) == 0)
        played.append(play(proxy))
        until(lambda: len(sessions(receiver)) == 4)
    assert sessions(receiver) == sorted(played)
    assert max(receiver.counted().values()) == 1


def test_a_killed_sender_is_started_again(proxy, receiver, until):
    played = [play(proxy)]
    until(lambda: sessions(receiver) == played)
    (sender,) = until(lambda: senders(proxy))
    sender.kill()
    played.append(play(proxy))
    until(lambda: sessions(receiver) == sorted(played))
    assert max(receiver.counted().values()) == 1


@pytest.mark.long_on("sqlite")
@pytest.mark.parametrize("database_kind", KINDS)
def test_one_of_two_replicas_sends_and_the_other_takes_over(proxy, receiver, serve, until):
    played = []
    with serve(proxy.store_url, [proxy.engine.url], free_port(), replica="second-replica"):
        for _ in range(4):
            played.append(play(proxy))
        until(lambda: sessions(receiver) == sorted(played))
        until(lambda: len(senders(proxy)) == 1)
    played.append(play(proxy))
    until(lambda: sessions(receiver) == sorted(played))
    assert len(until(lambda: senders(proxy))) == 1
    assert max(receiver.counted().values()) == 1


def test_headers_that_are_not_set_are_refused_before_the_proxy_serves(store_url, fake_engine, serve, monkeypatch):
    for value in ("", "no header", "a=b,c"):
        monkeypatch.setenv("SPAN_HEADERS", value)
        with (
            pytest.raises(ConfigError, match=r"'metrics\.traces\.headers_env': the environment variable SPAN_HEADERS"),
            serve(store_url, [fake_engine.url], free_port()),
        ):
            pass
    assert os.environ["SPAN_HEADERS"] == "a=b,c"
