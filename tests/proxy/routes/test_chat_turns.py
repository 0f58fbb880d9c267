"""Turns of a conversation through Chat Completions: exact tokens, forks, tool calls and template options."""

import json

import openai
import pytest

from agentrl.testing import Reply

from .chat_calls import HELLO, TOOLS, ask


@pytest.fixture
def proxy(shared_proxy):
    return shared_proxy


def test_a_second_turn_extends_the_first_byte_for_byte(proxy):
    session = proxy.session()
    proxy.engine.enqueue(proxy.says("dcba"), proxy.says("no"))
    first = ask(proxy, session).choices[0].message.model_dump()
    ask(proxy, session, [*HELLO, first, {"role": "user", "content": "again"}])
    one, two = proxy.calls(session)
    assert two["parent_id"] == one["id"]
    assert two["fork_reason"] is None
    assert proxy.engine.requests[1]["input_ids"] == [
        *one["prompt_delta_ids"],
        *one["output_ids"],
        *two["prompt_delta_ids"],
    ]
    assert two["new_messages"] == [{"role": "user", "content": "again"}]


def test_a_call_that_adds_no_message_extends_the_answer(proxy):
    session = proxy.session()
    proxy.engine.enqueue(proxy.says("dcba"), proxy.says("no"))
    first = ask(proxy, session).choices[0].message.model_dump()
    ask(proxy, session, [*HELLO, first])  # the agent lets the policy speak again
    one, two = proxy.calls(session)
    assert (two["parent_id"], two["fork_reason"], two["new_messages"]) == (one["id"], None, [])
    whole = [*one["prompt_delta_ids"], *one["output_ids"], *two["prompt_delta_ids"]]
    assert proxy.engine.requests[1]["input_ids"] == whole


def test_an_edited_history_forks_with_its_reason(proxy):
    session = proxy.session()
    proxy.engine.enqueue(proxy.says("dcba"), proxy.says("no"))
    ask(proxy, session)
    ask(proxy, session, [*HELLO, {"role": "assistant", "content": "edited"}, {"role": "user", "content": "again"}])
    assert [call["fork_reason"] for call in proxy.calls(session)] == [None, "history_edited"]


def test_a_truncated_answer_whose_text_is_other_tokens_forks_with_its_reason(proxy):
    session = proxy.session()
    cut = proxy.says("dé", end=False)[:-1]  # in the middle of a character
    proxy.engine.enqueue(Reply(cut, finish_reason="length"), proxy.says("no"))
    first = ask(proxy, session)
    assert first.choices[0].finish_reason == "length"
    ask(proxy, session, [*HELLO, first.choices[0].message.model_dump(), {"role": "user", "content": "again"}])
    assert [call["fork_reason"] for call in proxy.calls(session)] == [None, "truncated"]


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


def test_tool_arguments_with_an_unpaired_surrogate_are_recorded_unchanged(proxy):
    session = proxy.session()
    function = {"name": "calc", "arguments": '{"x": "\\ud800"}'}
    said = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": function}]}
    ask(proxy, session, [*HELLO, said, {"role": "tool", "tool_call_id": "1", "content": "?"}], tools=TOOLS)
    assert proxy.calls(session)[0]["new_messages"][1]["tool_calls"][0]["function"] == function


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "calc"}}])
@pytest.mark.parametrize("stream", [False, True])
def test_a_forced_call_is_held_to_a_grammar_and_not_trained(proxy, choice, stream):
    session = proxy.session()
    proxy.engine.enqueue(proxy.says("calc(ab)"), proxy.says("done"))
    answer = ask(proxy, session, tools=TOOLS, tool_choice=choice, stream=stream)
    if stream:
        parts = [p for event in answer for c in event.choices for p in c.delta.tool_calls or []]
        call_id, name = parts[0].id, parts[0].function.name
        arguments = "".join(part.function.arguments for part in parts)
    else:
        (call,) = answer.choices[0].message.tool_calls
        call_id, name, arguments = call.id, call.function.name, call.function.arguments
        assert answer.choices[0].message.content is None
    assert (name, json.loads(arguments)) == ("calc", {"x": "ab"})
    (recorded,) = proxy.calls(session)
    told = proxy.engine.requests[0]["sampling_params"]
    assert json.loads(told["structural_tag"])["format"]["elements"][0] == {"type": "const_string", "value": "calc("}
    assert recorded["prompt_delta_ids"] == proxy.engine.requests[0]["input_ids"]
    assert not recorded["trainable"]  # the distribution was modified
    assert proxy.renderer.decode(recorded["output_ids"]).startswith("calc(ab)")
    reply = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}],
    }
    ask(proxy, session, [*HELLO, reply, {"role": "tool", "tool_call_id": call_id, "content": "ba"}], tools=TOOLS)
    assert proxy.calls(session)[-1]["bridged"]


def test_template_options_reach_the_format_and_are_part_of_the_conversation(proxy):
    session = proxy.session()
    proxy.engine.enqueue(*[proxy.says("ab")] * 3)
    off = {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}
    with pytest.raises(openai.BadRequestError, match="the chat format 'chatml' has no option 'enable_thinking'"):
        ask(proxy, session, extra_body={"chat_template_kwargs": {"enable_thinking": True}})
    with pytest.raises(openai.BadRequestError, match="tools: cannot be set"):
        ask(proxy, session, extra_body={"chat_template_kwargs": {"tools": "x"}})
    ask(proxy, session, **off)
    more = [*HELLO, {"role": "assistant", "content": "ab"}, {"role": "user", "content": "c"}]
    ask(proxy, session, more, **off)
    ask(proxy, session, more)
    assert [call["bridged"] for call in proxy.calls(session)] == [False, True, True]


def test_with_tool_choice_none_a_call_is_text_and_the_prompt_is_the_same(proxy):
    session = proxy.session()
    proxy.engine.enqueue(proxy.says("calc(ab)"), proxy.says("calc(ab)"))
    answer = ask(proxy, session, tools=TOOLS, tool_choice="none")
    assert (answer.choices[0].message.content, answer.choices[0].message.tool_calls) == ("calc(ab)", None)
    ask(proxy, session, tools=TOOLS)
    first, second = proxy.engine.requests
    assert first["input_ids"] == second["input_ids"]
