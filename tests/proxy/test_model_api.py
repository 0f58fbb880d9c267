"""Chat Completions through the official SDK: exact tokens, bridged turns, commit before the end, visible failures."""

import json
import threading

import openai
import pytest
from sqlalchemy import text

from agentrl.testing import Reply

HELLO = [{"role": "user", "content": "abcd"}]


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "calc",
            "parameters": {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]},
        },
    }
]


def ask(proxy, session, messages=HELLO, **options):
    return proxy.sdk(session).chat.completions.create(model="test", messages=messages, **options)


def test_what_is_recorded_is_what_the_engine_sampled(proxy):
    session = proxy.session()
    ids = proxy.says("dcba")
    proxy.engine.enqueue(Reply(ids, logprobs=[-0.25] * len(ids)))
    answer = ask(proxy, session, logprobs=True)
    assert answer.choices[0].message.content == "dcba"
    assert answer.choices[0].finish_reason == "stop"
    assert [t.logprob for t in answer.choices[0].logprobs.content] == [-0.25] * len(ids)
    (call,) = proxy.calls(session)
    assert call["output_ids"] == ids
    assert call["logprobs"] == [-0.25] * len(ids)
    assert call["version_spans"] == [[0, 0, len(ids)]]
    assert call["prompt_delta_ids"] == proxy.engine.requests[0]["input_ids"]
    assert answer.id == f"chatcmpl-{call['id']}"


def test_a_second_turn_extends_the_first_byte_for_byte(proxy):
    session = proxy.session()
    proxy.engine.enqueue(proxy.says("dcba"), proxy.says("no"))
    first = ask(proxy, session).choices[0].message.model_dump()
    ask(proxy, session, [*HELLO, first, {"role": "user", "content": "again"}])
    one, two = proxy.calls(session)
    assert two["parent_id"] == one["id"]
    assert two["fork_reason"] is None
    assert proxy.engine.requests[1]["input_ids"] == [
        *one["prompt_delta_ids"], *one["output_ids"], *two["prompt_delta_ids"],
    ]  # fmt: skip
    assert two["new_messages"] == [{"role": "user", "content": "again"}]


def test_an_edited_history_forks_with_its_reason(proxy):
    session = proxy.session()
    proxy.engine.enqueue(proxy.says("dcba"), proxy.says("no"))
    ask(proxy, session)
    ask(proxy, session, [*HELLO, {"role": "assistant", "content": "edited"}, {"role": "user", "content": "again"}])
    assert [call["fork_reason"] for call in proxy.calls(session)] == [None, "history_edited"]


def test_a_truncated_answer_forks_with_its_reason(proxy):
    session = proxy.session()
    proxy.engine.enqueue(Reply(proxy.says("dcba", end=False), finish_reason="length"), proxy.says("no"))
    first = ask(proxy, session)
    assert first.choices[0].finish_reason == "length"
    ask(proxy, session, [*HELLO, first.choices[0].message.model_dump(), {"role": "user", "content": "again"}])
    assert [call["fork_reason"] for call in proxy.calls(session)] == [None, "truncated"]


@pytest.mark.parametrize("chunks", [None, [1], [2, 1], [100]])
def test_a_stream_says_the_same_however_the_engine_splits_it(proxy, chunks):
    session = proxy.session()
    ids = proxy.says("abcdefgh")
    proxy.engine.enqueue(Reply(ids, chunks=chunks))
    stream = list(ask(proxy, session, stream=True, stream_options={"include_usage": True}))
    assert "".join(e.choices[0].delta.content or "" for e in stream if e.choices) == "abcdefgh"
    assert [e.choices[0].finish_reason for e in stream if e.choices][-1] == "stop"
    assert stream[-1].usage.completion_tokens == len(ids)


def test_text_is_streamed_before_the_answer_is_complete_and_ends_after_the_commit(proxy):
    session = proxy.session()
    proxy.engine.enqueue(Reply(proxy.says("abcd"), hold_after=2))
    stream = iter(ask(proxy, session, stream=True))
    seen = ""
    while len(seen) < 2:
        seen += next(stream).choices[0].delta.content or ""
    assert [call["status"] for call in proxy.calls(session)] == ["running"]
    proxy.engine.release()
    for event in stream:
        if event.choices[0].finish_reason:
            assert [call["status"] for call in proxy.calls(session)] == ["complete"]
            break
    else:
        pytest.fail("the stream had no end")


def test_tool_calls_arrive_as_tool_calls_and_bridge(proxy):
    session = proxy.session()
    proxy.engine.enqueue(proxy.says("calc(ab)"), proxy.says("done"))
    answer = ask(proxy, session, tools=TOOLS)
    (tool,) = answer.choices[0].message.tool_calls
    assert (tool.function.name, json.loads(tool.function.arguments)) == ("calc", {"x": "ab"})
    assert answer.choices[0].finish_reason == "tool_calls"
    result = {"role": "tool", "tool_call_id": tool.id, "content": "ba"}
    ask(proxy, session, [*HELLO, answer.choices[0].message.model_dump(exclude_none=True), result], tools=TOOLS)
    assert [call["bridged"] for call in proxy.calls(session)] == [False, True]


def test_streamed_tool_calls_are_whole(proxy):
    session = proxy.session()
    proxy.engine.enqueue(Reply(proxy.says("calc(ab)"), chunks=[1] * 20))
    calls = [
        part
        for event in ask(proxy, session, tools=TOOLS, stream=True)
        if event.choices
        for part in event.choices[0].delta.tool_calls or []
    ]
    assert calls[0].function.name == "calc"
    assert json.loads("".join(part.function.arguments for part in calls)) == {"x": "ab"}


def test_a_stop_string_cuts_the_text_and_not_the_tokens(proxy):
    session = proxy.session()
    ids = proxy.says("ab.cd", end=False)
    proxy.engine.enqueue(Reply(ids, finish_reason="stop"))
    assert ask(proxy, session, stop=".").choices[0].message.content == "ab"
    assert proxy.calls(session)[0]["output_ids"] == ids
    assert proxy.engine.requests[0]["sampling_params"]["stop"] == ["."]


def test_training_sessions_explore_even_when_the_agent_asks_for_greedy(proxy):
    ask(proxy, proxy.session(), temperature=0)
    assert proxy.engine.requests[0]["sampling_params"]["temperature"] == 1.0


def test_evaluation_has_its_own_sampling(proxy):
    ask(proxy, proxy.session(sampling={"temperature": 0.0}))
    assert proxy.engine.requests[0]["sampling_params"]["temperature"] == 0.0


def test_versions_are_the_engines_own_also_in_the_middle_of_an_answer(proxy):
    session = proxy.session()
    ids = proxy.says("abcd")
    proxy.engine.enqueue(Reply(ids, versions=[3, 3, 4, 4, 4]))
    ask(proxy, session)
    assert proxy.calls(session)[0]["version_spans"] == [[3, 0, 2], [4, 2, 5]]


@pytest.mark.parametrize("missing", ["output_token_logprobs", "weight_versions", "output_ids"])
def test_an_engine_that_leaves_something_out_fails_the_call_visibly(proxy, missing):
    session = proxy.session()
    proxy.engine.enqueue(Reply(proxy.says("abcd"), omit=frozenset({missing})))
    with pytest.raises(openai.InternalServerError) as caught:
        ask(proxy, session)
    assert caught.value.status_code == 502
    (call,) = proxy.calls(session)
    assert call["status"] == "failed"
    assert "output_ids" not in call


def test_an_answer_that_breaks_off_undelivered_is_sampled_anew(proxy):
    session = proxy.session()
    proxy.engine.enqueue(Reply(proxy.says("abcd"), drop_after=2), proxy.says("xy"))
    assert ask(proxy, session).choices[0].message.content == "xy"
    assert proxy.calls(session)[0]["output_ids"] == proxy.says("xy")


def test_an_aborted_answer_is_continued_where_it_stopped(proxy, until):
    session = proxy.session()
    ids = proxy.says("abcd")
    proxy.engine.enqueue(Reply(ids, hold_after=2), Reply(ids[2:], versions=[1] * 3))
    answers = []
    worker = threading.Thread(target=lambda: answers.append(ask(proxy, session, max_tokens=20)))
    worker.start()
    until(lambda: proxy.engine.running)
    proxy.http.post(f"{proxy.engine.url}/abort_request", json={"abort_all": True})
    worker.join(20)
    (call,) = proxy.calls(session)
    assert call["status"] == "complete"
    if len(proxy.engine.requests) == 2:  # the abort came after some tokens, or before any
        sent = len(proxy.engine.requests[1]["input_ids"]) - len(proxy.engine.requests[0]["input_ids"])
        assert proxy.engine.requests[1]["sampling_params"]["max_new_tokens"] == 20 - sent


def test_a_call_waits_for_an_engine_that_comes_back(proxy):
    session = proxy.session()
    proxy.engine.stop()
    answers = []
    worker = threading.Thread(target=lambda: answers.append(ask(proxy, session)))
    worker.start()
    proxy.engine.enqueue(proxy.says("back"))
    proxy.engine.start()
    worker.join(20)
    assert answers[0].choices[0].message.content == "back"


def test_a_sealed_session_refuses_late_calls(proxy):
    session = proxy.session()
    proxy.post(f"/sessions/{session['session_id']}/end")
    with pytest.raises(openai.ConflictError):
        ask(proxy, session)


@pytest.mark.parametrize(
    ("options", "status", "code"),
    [
        ({"model": "gpt-9"}, 404, "model_not_found"),
        ({"max_tokens": 100_000}, 400, "context_length_exceeded"),
        ({"messages": [{"role": "user", "content": "a" * 5000}]}, 400, "context_length_exceeded"),
        ({"extra_body": {"temprature": 1}}, 422, "unsupported_parameter"),
    ],
)
def test_bad_requests_have_the_right_status_and_reach_no_engine(proxy, options, status, code):
    session = proxy.session()
    with pytest.raises(openai.APIStatusError) as caught:
        proxy.sdk(session).chat.completions.create(**{"model": "test", "messages": HELLO, **options})
    assert (caught.value.status_code, caught.value.code) == (status, code)
    assert proxy.engine.requests == []


def test_keys_open_only_what_is_theirs(proxy):
    mine, other = proxy.session(), proxy.session()
    body = {"messages": HELLO}
    path = f"/sessions/{mine['session_id']}/v1/chat/completions"

    def status(headers, at=path):
        return proxy.post(at, body, headers=headers).status_code

    assert status({}) == 401
    assert status({"Authorization": "Bearer wrong"}) == 401
    assert status({"Authorization": f"Bearer {other['api_key']}"}) == 403
    assert status({"x-api-key": mine["api_key"]}) == 200
    assert status({"Authorization": f"Bearer {mine['api_key']}"}, "/v1/chat/completions") == 200
    assert status({"Authorization": "Bearer run-key"}, "/v1/chat/completions") == 403
    assert (
        status({"Authorization": "Bearer run-key", "X-Session-ID": mine["session_id"]}, "/v1/chat/completions") == 200
    )
    assert proxy.post("/admin/publish", {"version": 0}).status_code == 403


def test_only_hashes_of_keys_are_stored(proxy):
    session = proxy.session()
    with proxy.database.read() as conn:
        stored = conn.execute(text("SELECT group_concat(key_hash) FROM sessions")).scalar_one()
    assert session["api_key"] not in stored


def test_malformed_json_is_refused(proxy):
    session = proxy.session()
    answer = proxy.http.post(
        f"{session['base_url']}/chat/completions", content=b"{", headers={"x-api-key": session["api_key"]}
    )
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "invalid_json"


def test_models(proxy):
    assert [m.id for m in proxy.sdk(proxy.session()).models.list()] == ["test"]
