"""Messages through the official SDK: one branch of exact tokens, streamed or whole, and the SDK's own errors."""

import asyncio
import importlib.util
import json
from pathlib import Path
from typing import Any

import anthropic
import pytest
from pydantic import BaseModel
from tokenizers import AddedToken, Tokenizer

from agentrl.models import resolve_model
from agentrl.testing import Reply

HELLO = [{"role": "user", "content": "abcd"}]
CALC = {
    "name": "calc",
    "input_schema": {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]},
}
BODY_LIMIT = 50_000


@pytest.fixture
def proxy(shared_proxy):
    return shared_proxy


@pytest.fixture
def run_config(run_config):
    return run_config | {"proxy": {"max_body_bytes": BODY_LIMIT}}


def options_of(session, **options):
    base_url = session["base_url"].removesuffix("/v1")  # the SDK appends it
    return {"base_url": base_url, "api_key": session["api_key"], "max_retries": 0, **options}


def sdk(session, **options):
    return anthropic.Anthropic(**options_of(session, **options))


def ask(session, messages=HELLO, **options):
    return sdk(session).messages.create(**{"model": "test", "max_tokens": 50, "messages": messages, **options})


def asked_by_stream(session, messages=HELLO, **options):
    asked = {"model": "test", "max_tokens": 50, "messages": messages, **options}
    with sdk(session).messages.stream(**asked) as events:
        return events.get_final_message()


def result_of(tool, content, **fields):
    return {"type": "tool_result", "tool_use_id": tool.id, "content": content, **fields}


def tools_of(message):
    return [block for block in message.content if block.type == "tool_use"]


def extends(proxy, session):
    """Each call's prompt is its predecessor's prompt and output and what is new."""
    calls = proxy.calls(session)
    assert [call["parent_id"] for call in calls] == [None, *(call["id"] for call in calls[:-1])]
    before: list[int] = []
    for call, request in zip(calls, proxy.engine.requests, strict=True):
        assert request["input_ids"] == before + call["prompt_delta_ids"]
        before = request["input_ids"] + call["output_ids"]
    return [call["fork_reason"] for call in calls] == [None] * len(calls)


def test_a_message_is_recorded_as_sampled(proxy):
    session = proxy.session()
    ids = proxy.says("dcba")
    proxy.engine.enqueue(ids)
    message = ask(session, system="no")
    assert [(block.type, block.text) for block in message.content] == [("text", "dcba")]
    assert (message.stop_reason, message.model) == ("end_turn", "test")
    (call,) = proxy.calls(session)
    assert message.id == f"msg_{call['id']}"
    assert (call["output_ids"], call["dialect"]) == (ids, "anthropic.messages")
    prompt = proxy.engine.requests[0]["input_ids"]
    assert prompt == proxy.renderer.render([{"role": "system", "content": "no"}, *HELLO], None)
    assert (message.usage.input_tokens, message.usage.output_tokens) == (len(prompt), len(ids))


@pytest.mark.parametrize("go", [ask, asked_by_stream])
def test_an_episode_with_tools_is_one_trajectory(proxy, go):
    session = proxy.session()
    proxy.engine.enqueue(proxy.says("calc(ab)"), proxy.says("calc(cd)"), proxy.says("ok"), proxy.says(""))
    asked = {"tools": [CALC], "system": [{"type": "text", "text": "no", "cache_control": {"type": "ephemeral"}}]}
    messages: list = [*HELLO]
    for output in ("ba", [{"type": "text", "text": "dc"}]):
        message = go(session, messages, **asked)
        assert message.stop_reason == "tool_use"
        (tool,) = tools_of(message)
        messages.append({"role": "assistant", "content": message.content})
        messages.append({"role": "user", "content": [result_of(tool, output, is_error=output == "ba")]})
    assert tool.input == {"x": "cd"}
    messages[-1]["content"].append({"type": "text", "text": "and?"})
    message = go(session, messages, **asked)
    assert message.content[0].text == "ok"
    messages += [message.to_param(), {"role": "user", "content": "thx"}]
    assert go(session, messages, **asked).content[0].text == ""
    assert extends(proxy, session)
    new = [[message["role"] for message in call["new_messages"]] for call in proxy.calls(session)]
    assert new[1:] == [["tool"], ["tool", "user"], ["user"]]


@pytest.mark.parametrize("stream", [False, True])
def test_the_sdks_tool_runner_ends_as_one_trajectory(proxy, stream):
    session = proxy.session()
    proxy.engine.enqueue(proxy.says("calc(ab)"), proxy.says("calc(no)"), proxy.says("ok"))

    @anthropic.beta_tool
    def calc(x: str) -> str:
        """Spell backwards."""
        if x == "no":
            raise ValueError("bad")
        return x[::-1]

    runner = sdk(session).beta.messages.tool_runner(
        model="test", max_tokens=50, messages=HELLO, tools=[calc], stream=stream
    )
    assert runner.until_done().content[0].text == "ok"
    results = [call["new_messages"][-1] for call in proxy.calls(session)[1:]]
    assert results[0]["content"] == "ba"
    assert "bad" in results[1]["content"]
    assert extends(proxy, session)


def test_a_named_tool_is_called(proxy):
    proxy.engine.respond = lambda ids, params: proxy.says("calc(ab)")
    message = ask(proxy.session(), tools=[CALC], tool_choice={"type": "tool", "name": "calc"})
    assert [tool.name for tool in tools_of(message)] == ["calc"]


@pytest.mark.parametrize("go", [ask, asked_by_stream])
def test_a_stop_sequence_is_named(proxy, go):
    session = proxy.session()
    ids = proxy.says("ab.cd", end=False)
    proxy.engine.enqueue(Reply(ids, finish_reason="stop", matched_stop="."))
    message = go(session, stop_sequences=["!", "."])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", ".")
    assert message.content[0].text == "ab"
    assert proxy.calls(session)[0]["output_ids"] == ids


def test_a_format_becomes_the_engines_grammar_and_the_parsed_message_can_be_sent_back(proxy):
    class Shape(BaseModel):
        x: str

    session = proxy.session()
    proxy.engine.enqueue(proxy.says('{"x": "ab"}'), proxy.says("ok"))
    parsed = sdk(session).messages.parse(model="test", max_tokens=50, messages=HELLO, output_format=Shape)
    assert parsed.parsed_output == Shape(x="ab")
    schema = json.loads(proxy.engine.requests[0]["sampling_params"]["json_schema"])
    assert schema["properties"]["x"]["type"] == "string"
    ask(session, [*HELLO, {"role": "assistant", "content": parsed.content}, {"role": "user", "content": "thx"}])
    assert extends(proxy, session)


def test_tokens_are_counted_without_a_call(proxy):
    session = proxy.session()
    asked = {"messages": HELLO, "system": "no", "tools": [CALC]}
    count = sdk(session).messages.count_tokens(model="test", **asked)
    assert proxy.calls(session) == []
    assert ask(session, **asked).usage.input_tokens == count.input_tokens


def test_raw_and_asynchronous_clients_read_the_same(proxy):
    session = proxy.session()
    proxy.engine.enqueue(proxy.says("ab"), proxy.says("ab"), proxy.says("ab"))
    asked: Any = {"model": "test", "max_tokens": 50, "messages": HELLO}
    raw = sdk(session).messages.with_raw_response.create(**asked)
    assert raw.headers["content-type"] == "application/json"
    assert raw.parse().content[0].text == "ab"

    async def both():
        async with anthropic.AsyncAnthropic(**options_of(session)) as client:
            whole = await client.messages.create(**asked)
            async with client.messages.stream(**asked) as events:
                return whole.content[0].text, await events.get_final_text()

    assert asyncio.run(both()) == ("ab", "ab")


def test_models_are_listed_as_each_sdk_expects_them(proxy):
    session = proxy.session()
    model, default = sdk(session).models.list()
    assert (model.id, model.lifecycle, model.max_input_tokens) == ("test", "active", proxy.renderer.max_context)
    assert sdk(session).models.retrieve("test") == model
    assert (default.id, sdk(session).models.retrieve("default")) == ("default", default)
    with pytest.raises(anthropic.NotFoundError, match="'test'"):
        sdk(session).models.retrieve("tset")
    same, _ = proxy.sdk(session).models.list()
    assert (same.id, same.created) == ("test", int(model.created_at.timestamp()))
    assert proxy.sdk(session).models.retrieve("test") == same


# -- reasoning -----------------------------------------------------------------------------------------------------


@pytest.fixture
def tiny_model(request, tiny_model) -> Path:
    """The tiny model or, for a test with `reasons`, its words behind the chat template of Qwen3."""
    return request.getfixturevalue("reasoning_model") if "reasons" in request.fixturenames else tiny_model


@pytest.fixture(scope="module")
def reasoning_model(tmp_path_factory) -> Path:
    tiny_model, folder = resolve_model("tiny"), tmp_path_factory.mktemp("reasoning")
    spec = importlib.util.find_spec("trl")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("trl is not installed")
    tokenizer = Tokenizer.from_file(str(tiny_model / "tokenizer.json"))
    for token in ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"):
        tokenizer.add_tokens([AddedToken(token, special=False, normalized=False)])
    tokenizer.save(str(folder / "tokenizer.json"))
    for name in ("tokenizer_config.json", "generation_config.json"):
        (folder / name).write_bytes((tiny_model / name).read_bytes())
    template = Path(spec.submodule_search_locations[0]) / "chat_templates" / "qwen3.jinja"
    (folder / "chat_template.jinja").write_bytes(template.read_bytes())
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", "max_position_embeddings": 4096}))
    return folder


@pytest.fixture
def reasons(tiny_model) -> None:
    """Serves a model whose format has a place for reasoning."""


def writes(proxy, text):
    return proxy.renderer.encode(text + "<|im_end|>")


@pytest.mark.parametrize(("go", "display"), [(ask, "summarized"), (asked_by_stream, "omitted")])
def test_an_episode_with_thinking_is_one_trajectory(reasons, proxy, go, display):
    session = proxy.session()
    call = '<tool_call>\n{"name": "calc", "arguments": {"x": "ab"}}\n</tool_call>'
    proxy.engine.enqueue(
        writes(proxy, f"<think>\nhm\n</think>\n\nwell\n{call}\n{call}"), writes(proxy, "<think>\nso\n</think>\n\nba")
    )
    asked = {"tools": [CALC], "thinking": {"type": "adaptive", "display": display}, "max_tokens": 500}
    message = go(session, **asked)
    assert message.usage.output_tokens_details.thinking_tokens == len(writes(proxy, "<think>\nhm")) - 1
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert message.content[0].thinking.strip() == ("hm" if display == "summarized" else "")
    results = [result_of(tool, "ba") for tool in tools_of(message)]
    message = go(session, [*HELLO, message.to_param(), {"role": "user", "content": results}], **asked)
    assert [block.type for block in message.content] == ["thinking", "text"]
    assert message.content[1].text.strip() == "ba"
    assert extends(proxy, session)


NOT = {"type": "disabled"}


def test_every_dialect_switches_thinking_on_and_off(reasons, proxy):
    session = proxy.session()
    client, off = proxy.sdk(session), "<think>\n\n</think>\n\n"
    proxy.engine.enqueue(*[writes(proxy, "well")] * 8)
    explicit = {"chat_template_kwargs": {"enable_thinking": True}}
    ask(session, thinking=NOT)
    ask(session, thinking={"type": "adaptive"})
    ask(session, thinking={"type": "between_tools"})
    client.chat.completions.create(model="test", messages=HELLO, reasoning_effort="none")
    client.chat.completions.create(model="test", messages=HELLO, reasoning_effort="none", extra_body=explicit)
    client.chat.completions.create(model="test", messages=HELLO)
    client.responses.create(model="test", input="abcd", reasoning={"effort": "none"})
    client.responses.create(model="test", input="abcd", reasoning={"effort": "high"})
    prompts = [proxy.renderer.decode(request["input_ids"]) for request in proxy.engine.requests]
    assert [prompt.endswith(off) for prompt in prompts] == [True, False, False, True, False, False, True, False]
    counted = sdk(session).messages.count_tokens(model="test", messages=HELLO, thinking=NOT)
    assert counted.input_tokens == len(proxy.engine.requests[0]["input_ids"])


@pytest.mark.parametrize("thinking", [NOT, {"type": "enabled", "budget_tokens": 1024}])
def test_turns_with_the_same_thinking_setting_are_one_trajectory(reasons, proxy, thinking):
    session = proxy.session()
    call = '<tool_call>\n{"name": "calc", "arguments": {"x": "ab"}}\n</tool_call>'
    proxy.engine.enqueue(writes(proxy, call), writes(proxy, "ba"))
    asked = {"tools": [CALC], "thinking": thinking}
    message = ask(session, **asked)
    results = [result_of(tool, "ba") for tool in tools_of(message)]
    ask(session, [*HELLO, message.to_param(), {"role": "user", "content": results}], **asked)
    assert extends(proxy, session)


def test_thinking_is_ignored_by_a_format_without_the_option(proxy):
    session = proxy.session()
    proxy.engine.enqueue(proxy.says("ab"), proxy.says("ba"))
    message = ask(session, thinking={"type": "adaptive"})
    ask(session, [*HELLO, message.to_param(), {"role": "user", "content": "c"}], thinking=NOT)
    assert extends(proxy, session)


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_is_counted_in_openais_usage_too(reasons, proxy, stream):
    sdk = proxy.sdk(proxy.session())
    answer = writes(proxy, "<think>\nhm\n</think>\n\nwell")
    counted = len(writes(proxy, "<think>\nhm")) - 1
    proxy.engine.enqueue(answer, answer)
    chat = sdk.chat.completions.create(
        model="test", messages=HELLO, stream=stream, **({"stream_options": {"include_usage": True}} if stream else {})
    )
    usage = list(chat)[-1].usage if stream else chat.usage
    assert (usage.completion_tokens, usage.completion_tokens_details.reasoning_tokens) == (len(answer), counted)
    response = sdk.responses.create(model="test", input="abcd", stream=stream)
    usage = (list(response)[-1].response if stream else response).usage
    assert (usage.output_tokens, usage.output_tokens_details.reasoning_tokens) == (len(answer), counted)


# -- errors --------------------------------------------------------------------------------------------------------


def test_bad_requests_raise_the_sdks_own_errors_and_reach_no_engine(proxy):
    session = proxy.session()
    image = {"type": "image", "source": {"type": "url", "url": "http://images/1"}}
    for options, raised, code in (
        ({"system": "a" * BODY_LIMIT}, anthropic.ContentTooLargeError, "body_too_large"),
        ({"messages": [{"role": "user", "content": [image]}]}, anthropic.BadRequestError, "invalid_messages"),
    ):
        for stream in (False, True):
            with pytest.raises(raised) as caught:
                ask(session, **options, stream=stream)
            assert caught.value.error_code == code
    assert proxy.engine.requests == proxy.calls(session) == []


def test_a_count_of_bad_messages_is_refused_in_anthropics_shape(proxy):
    with pytest.raises(anthropic.BadRequestError) as caught:
        sdk(proxy.session()).messages.count_tokens(model="test", messages=[])
    assert (caught.value.type, caught.value.error_code) == ("invalid_request_error", "invalid_messages")
