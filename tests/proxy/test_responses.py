"""Responses through the official SDK: one tree of exact tokens, with the client's state or ours, streamed or whole."""

import asyncio
import json

import openai
import pytest
from pydantic import BaseModel

CALC = {
    "type": "function",
    "name": "calc",
    "parameters": {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]},
    "strict": False,
}


@pytest.fixture
def proxy(shared_proxy):
    return shared_proxy


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


def test_items_sent_back_extend_the_trajectory(proxy):
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
def test_previous_response_id_extends_the_trajectory(proxy, stream):
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


def test_instructions_apply_to_one_call_only(proxy):
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
def test_an_unknown_previous_response_id_is_refused(proxy, name):
    with pytest.raises(openai.APIStatusError) as caught:
        ask(proxy, proxy.session(), previous_response_id=name)
    assert caught.value.status_code in (400, 404)
    assert (caught.value.code, caught.value.param) == ("previous_response_not_found", "previous_response_id")


def test_a_response_of_another_session_cannot_be_continued(proxy):
    first = ask(proxy, proxy.session())
    with pytest.raises(openai.APIStatusError) as caught:
        ask(proxy, proxy.session(), previous_response_id=first.id)
    assert caught.value.code == "previous_response_not_found"


def test_a_format_becomes_the_engines_grammar_and_the_sdk_parses_the_answer(proxy):
    class Shape(BaseModel):
        x: str

    proxy.engine.enqueue(proxy.says('{"x": "ab"}'))
    parsed = proxy.sdk(proxy.session()).responses.parse(model="test", input="abcd", text_format=Shape)
    assert parsed.output_parsed == Shape(x="ab")
    schema = json.loads(proxy.engine.requests[0]["sampling_params"]["json_schema"])
    assert schema["properties"]["x"]["type"] == "string"


def test_items_parsed_by_the_sdk_can_be_sent_back(proxy):
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
