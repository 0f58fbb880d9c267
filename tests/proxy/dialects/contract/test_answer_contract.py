"""Answers of every dialect: recorded token by token, whole or streamed, committed before their end."""

from __future__ import annotations

import pytest

from agentrl.proxy.dialects import DIALECTS
from agentrl.store.sessions.areal_sessions import RESPONSE_IDS
from agentrl.testing import Reply

from .clients import CLIENTS, HELLO, clients

streamed_or_whole = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])


def test_every_dialect_is_under_contract_and_its_response_ids_are_exported():
    assert CLIENTS.keys() == {dialect.name for dialect in DIALECTS.values()} == RESPONSE_IDS.keys()
    assert {name: client.prefix for name, client in CLIENTS.items()} == RESPONSE_IDS


@clients()
@pytest.mark.parametrize("chunks", ["whole", None, [1], [2, 1], [100]], ids=str)
def test_an_answer_is_recorded_token_by_token_however_it_is_delivered(proxy, client, chunks):
    session, ids = proxy.session(), proxy.says("abcdefgh")
    stream = chunks != "whole"
    logprobs = [-0.25] * len(ids)
    proxy.engine.enqueue(Reply(ids, logprobs=logprobs, chunks=chunks if stream else None))
    said = client.answer(session, stream=stream)
    assert (said.text, said.reason, said.tools) == ("abcdefgh", client.reasons["stop"], [])
    (call,) = proxy.calls(session)
    assert said.id == client.prefix + call["id"]
    assert (call["dialect"], call["status"]) == (client.dialect.name, "complete")
    assert (call["output_ids"], call["logprobs"]) == (ids, logprobs)
    assert call["version_spans"] == [[0, 0, len(ids)]]
    prompt = proxy.renderer.render(HELLO, None) if client.is_chat else proxy.renderer.encode("abcd")
    assert proxy.engine.requests[0]["input_ids"] == call["prompt_delta_ids"] == prompt
    assert (said.prompt_tokens, said.output_tokens) == (len(prompt), len(ids))


@clients()
def test_text_is_streamed_before_the_answer_is_complete_and_the_end_after_the_commit(proxy, client):
    session = proxy.session()
    proxy.engine.enqueue(Reply(proxy.says("abcd"), hold_after=2))
    events = iter(client.ask(session, stream=True))
    seen = ""
    while len(seen) < 2:
        seen += client.text_of(next(events))
    assert [call["status"] for call in proxy.calls(session)] == ["running"]
    proxy.engine.release()
    at_ends = [[call["status"] for call in proxy.calls(session)] for event in events if client.is_end(event)]
    assert at_ends == [["complete"]] * len(at_ends) != []


@clients()
@streamed_or_whole
def test_an_answer_cut_at_the_token_limit_has_the_finish_reason_of_the_dialect(proxy, client, stream):
    proxy.engine.enqueue(Reply(proxy.says("dcba", end=False), finish_reason="length"))
    said = client.answer(proxy.session(), stream=stream, **{client.limit: 4})
    assert (said.text, said.reason) == ("dcba", client.reasons["length"])
    assert proxy.engine.requests[0]["sampling_params"]["max_new_tokens"] == 4


@clients(with_field="stop")
@streamed_or_whole
def test_a_stop_string_cuts_the_text_and_not_the_recorded_tokens(proxy, client, stream):
    session, ids = proxy.session(), proxy.says("ab.cd", end=False)
    proxy.engine.enqueue(Reply(ids, finish_reason="stop"))
    assert client.answer(session, stream=stream, **{client.stop: ["."]}).text == "ab"
    assert proxy.calls(session)[0]["output_ids"] == ids
    assert proxy.engine.requests[0]["sampling_params"]["stop"] == ["."]


@clients(with_field="tool")
@streamed_or_whole
def test_a_tool_call_has_its_name_and_arguments(proxy, client, stream):
    proxy.engine.enqueue(Reply(proxy.says("calc(ab)"), chunks=[1] * 20))
    said = client.answer(proxy.session(), stream=stream, tools=[client.tool])
    assert (said.text, said.tools, said.reason) == ("", [("calc", {"x": "ab"})], client.reasons["tool_calls"])


@clients(with_field="tool")
def test_a_streamed_tool_call_ends_only_after_the_commit(proxy, client):
    session = proxy.session()
    proxy.engine.enqueue(Reply(proxy.says("calc(ab)"), chunks=[1] * 20))
    events = client.ask(session, stream=True, tools=[client.tool])
    at_ends = [[call["status"] for call in proxy.calls(session)] for event in events if client.is_end(event)]
    assert at_ends == [["complete"]] * len(at_ends) != []
