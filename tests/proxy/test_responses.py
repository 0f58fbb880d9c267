"""Responses through the official SDK: one tree of exact tokens, with the client's state or ours, streamed or whole."""

import asyncio
import json

import openai
import pytest
from pydantic import BaseModel

from agentrl.testing import Reply

CALC = {
    "type": "function",
    "name": "calc",
    "parameters": {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]},
    "strict": False,
}


def ask(proxy, session, input="abcd", **options):
    return proxy.sdk(session).responses.create(model="test", input=input, **options)


def result_of(tool, output):
    return {"type": "function_call_output", "call_id": tool.call_id, "output": output}


def extends(proxy, session):
    """Each call's prompt is its predecessor's prompt and output and what is new."""
    calls = proxy.calls(session)
    assert [call["parent_id"] for call in calls] == [None, *(call["id"] for call in calls[:-1])]
    before: list[int] = []
    for call, request in zip(calls, proxy.engine.requests, strict=True):
        assert request["input_ids"] == before + call["prompt_delta_ids"]
        before = request["input_ids"] + call["output_ids"]
    return [call["fork_reason"] for call in calls] == [None] * len(calls)


def test_a_response_is_recorded_as_sampled(proxy):
    session = proxy.session()
    ids = proxy.says("dcba")
    proxy.engine.enqueue(ids)
    response = ask(proxy, session, instructions="no", include=["message.output_text.logprobs"])
    assert (response.output_text, response.status) == ("dcba", "completed")
    assert (response.usage.output_tokens, len(response.output[0].content[0].logprobs)) == (len(ids), len(ids))
    (call,) = proxy.calls(session)
    assert response.id == f"resp_{call['id']}"
    assert (call["output_ids"], call["dialect"]) == (ids, "openai.responses")


def test_an_agent_that_keeps_the_items_extends_one_trajectory(proxy):
    session = proxy.session()
    proxy.engine.enqueue(proxy.says("calc(ab)"), proxy.says("ba"), proxy.says("ok"))
    items: list = [{"role": "user", "content": "abcd"}]
    first = ask(proxy, session, items, tools=[CALC], instructions="no")
    (tool,) = [item for item in first.output if item.type == "function_call"]
    assert (tool.name, json.loads(tool.arguments)) == ("calc", {"x": "ab"})
    items += [*first.output, result_of(tool, "ba")]
    second = ask(proxy, session, items, tools=[CALC], instructions="no")
    items += [*second.output, {"role": "user", "content": [{"type": "input_text", "text": "thx"}]}]
    assert ask(proxy, session, items, tools=[CALC], instructions="no").output_text == "ok"
    assert extends(proxy, session)


@pytest.mark.parametrize("stream", [False, True])
def test_an_agent_that_names_the_response_before_extends_it_too(proxy, stream):
    session = proxy.session()
    proxy.engine.enqueue(proxy.says("calc(ab)"), proxy.says("ba"), proxy.says("ok"))

    def go(input, before=None):
        if not stream:
            return ask(proxy, session, input, tools=[CALC], previous_response_id=before)
        asked = {"model": "test", "input": input, "tools": [CALC]}
        if before:
            asked["previous_response_id"] = before
        with proxy.sdk(session).responses.stream(**asked) as events:
            return events.get_final_response()

    first = go("abcd")
    second = go([result_of(first.output[-1], "ba")], first.id)
    third = go("thx", second.id)
    assert (second.output_text, third.output_text, third.previous_response_id) == ("ba", "ok", second.id)
    assert extends(proxy, session)


def test_instructions_are_of_one_call(proxy):
    session = proxy.session()
    proxy.engine.enqueue(proxy.says("a"), proxy.says("b"), proxy.says("c"))
    first = ask(proxy, session, "hi", instructions="one")
    second = ask(proxy, session, "ho", instructions="two", previous_response_id=first.id)
    ask(proxy, session, "hu", previous_response_id=second.id)
    conversation = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "a"},
        {"role": "user", "content": "ho"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "hu"},
    ]
    wanted = [[{"role": "system", "content": "two"}, *conversation[:3]], conversation]
    prompts = [request["input_ids"] for request in proxy.engine.requests[1:]]
    assert prompts == [proxy.renderer.render(messages, None) for messages in wanted]


@pytest.mark.parametrize("name", ["resp_" + "0" * 32, "resp_x"])
def test_a_response_that_was_never_given_cannot_be_continued(proxy, name):
    with pytest.raises(openai.APIStatusError) as caught:
        ask(proxy, proxy.session(), previous_response_id=name)
    assert caught.value.status_code in (400, 404)
    assert (caught.value.code, caught.value.param) == ("previous_response_not_found", "previous_response_id")


def test_a_response_of_another_session_cannot_be_continued(proxy):
    first = ask(proxy, proxy.session())
    with pytest.raises(openai.APIStatusError) as caught:
        ask(proxy, proxy.session(), previous_response_id=first.id)
    assert caught.value.code == "previous_response_not_found"


@pytest.mark.parametrize("chunks", [None, [1], [2, 1], [100]])
def test_a_stream_says_the_same_however_the_engine_splits_it(proxy, chunks):
    session = proxy.session()
    proxy.engine.enqueue(Reply(proxy.says("abcdefgh"), chunks=chunks))
    with proxy.sdk(session).responses.stream(model="test", input="abcd") as events:
        text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
        final = events.get_final_response()
    assert text == final.output_text == "abcdefgh"
    assert final.id == f"resp_{proxy.calls(session)[0]['id']}"


def test_text_is_streamed_before_the_answer_is_complete_and_ends_after_the_commit(proxy):
    session = proxy.session()
    proxy.engine.enqueue(Reply(proxy.says("abcd"), hold_after=2))
    events = iter(ask(proxy, session, stream=True))
    seen = ""
    while len(seen) < 2:
        event = next(events)
        seen += event.delta if event.type == "response.output_text.delta" else ""
    assert [call["status"] for call in proxy.calls(session)] == ["running"]
    proxy.engine.release()
    for event in events:
        if event.type == "response.completed":
            assert [call["status"] for call in proxy.calls(session)] == ["complete"]
            break
    else:
        pytest.fail("the stream had no end")


def test_a_streamed_function_call_is_done_only_after_the_commit(proxy):
    session = proxy.session()
    proxy.engine.enqueue(Reply(proxy.says("calc(ab)"), chunks=[1] * 20))
    done = []
    for event in ask(proxy, session, tools=[CALC], stream=True):
        if event.type == "response.function_call_arguments.done":
            assert [call["status"] for call in proxy.calls(session)] == ["complete"]
            done.append((event.name, json.loads(event.arguments)))
    assert done == [("calc", {"x": "ab"})]
    assert event.type == "response.completed"


def test_an_answer_cut_short_is_incomplete(proxy):
    proxy.engine.enqueue(Reply(proxy.says("dcba", end=False), finish_reason="length"))
    response = ask(proxy, proxy.session(), max_output_tokens=4)
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert proxy.engine.requests[0]["sampling_params"]["max_new_tokens"] == 4


def test_an_engine_that_dies_in_a_stream_raises_in_the_client(proxy):
    session = proxy.session()
    proxy.engine.enqueue(*[Reply(proxy.says("abcd"), chunks=[1] * 9, drop_after=2)] * 5)
    seen: list[str] = []
    with pytest.raises(openai.APIError) as caught:
        seen.extend(event.type for event in ask(proxy, session, stream=True))
    assert seen[-1] == "response.failed"
    assert caught.value.code == "engine_died"
    assert [call["status"] for call in proxy.calls(session)] == ["failed"]


def test_a_format_is_the_engines_grammar_and_the_sdk_parses_what_comes(proxy):
    class Shape(BaseModel):
        x: str

    proxy.engine.enqueue(proxy.says('{"x": "ab"}'))
    parsed = proxy.sdk(proxy.session()).responses.parse(model="test", input="abcd", text_format=Shape)
    assert parsed.output_parsed == Shape(x="ab")
    schema = json.loads(proxy.engine.requests[0]["sampling_params"]["json_schema"])
    assert schema["properties"]["x"]["type"] == "string"


def test_what_the_sdk_parsed_can_be_sent_back(proxy):
    class Shape(BaseModel):
        x: str

    session = proxy.session()
    proxy.engine.enqueue(proxy.says('{"x": "ab"}'), proxy.says("ok"))
    parsed = proxy.sdk(session).responses.parse(model="test", input="abcd", text_format=Shape)
    back = [item.model_dump() for item in parsed.output]
    ask(proxy, session, [{"role": "user", "content": "abcd"}, *back, {"role": "user", "content": "thx"}])
    assert extends(proxy, session)


def test_a_named_tool_is_called(proxy):
    session = proxy.session()
    proxy.engine.respond = lambda ids, params: proxy.says("calc(ab)")
    response = ask(proxy, session, tools=[CALC], tool_choice={"type": "function", "name": "calc"})
    assert [item.type for item in response.output] == ["function_call"]


def test_bad_input_is_refused_in_openais_shape_with_its_place(proxy):
    session = proxy.session()
    with pytest.raises(openai.BadRequestError) as caught:
        ask(proxy, session, [{"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]}])
    assert caught.value.param == "input[0].content[0]"
    with pytest.raises(openai.BadRequestError) as refused:
        ask(proxy, session, background=True)
    assert refused.value.param == "background"
    assert proxy.calls(session) == []


def test_raw_and_asynchronous_clients_read_the_same(proxy):
    session = proxy.session()
    proxy.engine.enqueue(proxy.says("ab"), proxy.says("ab"))
    raw = proxy.sdk(session).responses.with_raw_response.create(model="test", input="abcd")
    assert raw.headers["content-type"] == "application/json"
    assert raw.parse().output_text == "ab"

    async def streamed():
        async with (
            openai.AsyncOpenAI(base_url=session["base_url"], api_key=session["api_key"]) as client,
            client.responses.stream(model="test", input="abcd") as events,
        ):
            return (await events.get_final_response()).output_text

    assert asyncio.run(streamed()) == "ab"
