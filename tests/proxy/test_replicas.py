"""Two replicas serve one session by turns: each finds what the other recorded, and forks nothing."""

from __future__ import annotations

from typing import Any

import pytest
from databases import KINDS

from agentrl.store.calls import call_tree
from agentrl.testing import Reply


def chat(proxy: Any, session: dict[str, Any], messages: list[dict[str, Any]]) -> None:
    """Ask, and add the answer and a next question to the conversation."""
    answer = proxy.post(f"/sessions/{session['session_id']}/v1/chat/completions", {"messages": messages})
    assert answer.status_code == 200, answer.text
    messages += [answer.json()["choices"][0]["message"], {"role": "user", "content": "more"}]


@pytest.mark.long_on("postgresql")
@pytest.mark.parametrize("database_kind", KINDS)
def test_a_conversation_that_goes_back_and_forth_is_one_path(proxy, second):
    session = proxy.session()
    messages = [{"role": "user", "content": "one"}]
    for turn, replica in enumerate([proxy, second, proxy, proxy, second, proxy]):
        proxy.engine.enqueue(proxy.says("aabb"[turn % 4 :]))
        chat(replica, session, messages)
    calls = proxy.calls(session)
    assert [call["parent_id"] for call in calls] == [None, *(call["id"] for call in calls[:-1])]
    assert {call["fork_reason"] for call in calls} == {None}


@pytest.mark.parametrize("kind", ["ids", "text"])
def test_raw_prompts_that_go_back_and_forth_are_one_path(proxy, second, kind):
    session = proxy.session()
    prompt: Any = proxy.says("hello", end=False) if kind == "ids" else "hello"
    for replica in (proxy, second, proxy, second):
        proxy.engine.enqueue(Reply(proxy.says("ab", end=False), finish_reason="length"))
        body = {"prompt": prompt, "return_token_ids": True}
        answer = replica.post(f"/sessions/{session['session_id']}/v1/completions", body).json()["choices"][0]
        prompt = prompt + answer["token_ids"] if kind == "ids" else prompt + answer["text"]
    calls = proxy.calls(session)
    assert [call["parent_id"] for call in calls] == [None, *(call["id"] for call in calls[:-1])]


def test_only_calls_committed_since_the_last_read_are_loaded(proxy, second, monkeypatch):
    session, load, loaded = proxy.session(), call_tree.load_tree, []

    def counting(*args: Any) -> Any:
        found = load(*args)
        loaded.append([node.id for node in found[1]])
        return found

    monkeypatch.setattr(call_tree, "load_tree", counting)
    messages = [{"role": "user", "content": "one"}]
    for replica in (proxy, proxy, second, proxy):
        chat(replica, session, messages)
    first, again, other, _ = (call["id"] for call in proxy.calls(session))
    assert loaded == [[first, again], [other]]  # a session that was opened here has no calls
