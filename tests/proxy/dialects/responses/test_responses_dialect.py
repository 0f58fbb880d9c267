"""Responses: items both ways, the event grammar, and every parameter supported, harmless or refused by name."""

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from agentrl.domain.schemas import UNREAD
from agentrl.errors import RequestError
from agentrl.proxy.dialects.model_answer import Answer, AnswerDelta, ResponseHeader, Tokens
from agentrl.proxy.dialects.model_request import Named
from agentrl.proxy.dialects.responses.responses_dialect import OpenAIResponses
from agentrl.rendering import ContentDelta, ReasoningDelta, ToolCallDelta
from agentrl.rendering.conversation import canonical
from agentrl.rendering.validation import validate_messages

DIALECT = OpenAIResponses()
EVENT = TypeAdapter(ResponseStreamEvent)
ID = "0123456789abcdef" * 2
CALC = {"type": "function", "name": "calc", "parameters": {"type": "object", "properties": {}}}
LOGPROBS = "message.output_text.logprobs"
ENCRYPTED = "reasoning.encrypted_content"


def decode(**fields):
    return DIALECT.decode(json.dumps({"input": "hi", **fields}).encode())


def refusal(**fields) -> RequestError:
    with pytest.raises(RequestError) as caught:
        decode(**fields)
    return caught.value


def header(**fields) -> ResponseHeader:
    return ResponseHeader(
        id=ID, created=7, model="m", prompt_tokens=3, decode=lambda ids: "".join(map(chr, ids)), **fields
    )


def answer(message, *, finish_reason="stop", text="ab") -> Answer:
    ids = [ord(c) for c in text]
    return Answer(
        interaction_id=ID,
        message={"role": "assistant", **message},
        finish_reason=finish_reason,
        stop=None,
        prompt_ids=[1, 2, 3],
        cached_tokens=2,
        tokens=Tokens(ids, [-0.5] * len(ids)),
        versions=[[0, 0, len(ids)]],
    )


def call(id, name, arguments):
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def encode(request, the_answer) -> Any:
    """The response as the SDK's own type."""
    return Response.model_validate_json(DIALECT.encode(request, header(), [the_answer]))


def events_of(data: bytes):
    """Server-sent events as the SDK's own types; the `event:` line says the same as the data."""
    found = []
    for block in data.decode().split("\n\n")[:-1]:
        name, payload = re.fullmatch(r"event: (\S+)\ndata: (.*)", block).groups()
        assert json.loads(payload)["type"] == name
        found.append(EVENT.validate_json(payload))
    return found


def stream(request, deltas, the_answer):
    """What a stream of these deltas sends; the tokens come before them."""
    encoder = DIALECT.stream(request, header())
    data = encoder.start() + encoder.push(0, AnswerDelta([], the_answer.tokens))
    for delta in deltas:
        data += encoder.push(0, AnswerDelta([delta], Tokens([], [])))
    return events_of(data + encoder.finish(0, the_answer) + encoder.end([the_answer]))


def sent_back(response: Response):
    """Its output as an agent sends it back."""
    items = [item.model_dump(mode="json", exclude_unset=True) for item in response.output]
    return DIALECT.decode(json.dumps({"input": [{"role": "user", "content": "q"}, *items]}).encode()).messages[1:]


TEXT = st.text(st.characters(codec="utf-8"), min_size=1, max_size=6)
ARGUMENTS = st.sampled_from(["{}", '{"x": 1}', '{"x":"ü"}', "not json", ""])
CALLS = st.lists(st.tuples(st.sampled_from(["calc", "look"]), ARGUMENTS), max_size=3)
DELTAS = st.lists(st.builds(ContentDelta, TEXT) | st.builds(ReasoningDelta, TEXT), max_size=5)


def message_from(deltas):
    """The message that deltas add up to."""
    content = "".join(d.text for d in deltas if isinstance(d, ContentDelta))
    reasoning = "".join(d.text for d in deltas if isinstance(d, ReasoningDelta))
    calls: dict[int, Any] = {}
    for delta in deltas:
        if isinstance(delta, ToolCallDelta):
            if delta.id is not None:
                calls[delta.index] = call(delta.id, delta.name, "")
            calls[delta.index]["function"]["arguments"] += delta.arguments
    message: dict[str, Any] = {"content": content or (None if calls or reasoning else "")}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = list(calls.values())
    return message


def with_calls(deltas, calls):
    found = list(deltas)
    for i, (name, arguments) in enumerate(calls):
        half = len(arguments) // 2
        found += [ToolCallDelta(i, f"call_{i}", name, arguments[:half]), ToolCallDelta(i, None, None, arguments[half:])]
    return found


@given(deltas=DELTAS, calls=CALLS, include=st.sampled_from([None, [ENCRYPTED]]))
def test_what_was_delivered_comes_back_as_the_same_message(deltas, calls, include):
    message = message_from(with_calls(deltas, calls))
    (back,) = sent_back(encode(decode(include=include), answer(message)))
    validate_messages([back])
    assert canonical(back) == canonical({"role": "assistant", **message})
    assert back.get("reasoning_content") == message.get("reasoning_content")


@given(
    deltas=DELTAS,
    calls=CALLS,
    tail=DELTAS,
    length=st.booleans(),
    include=st.sampled_from([[], [ENCRYPTED], [LOGPROBS]]),
)
def test_a_stream_is_the_response_in_events(deltas, calls, tail, length, include):
    all_deltas = with_calls(deltas, calls) + tail
    message = message_from(all_deltas)
    the_answer = answer(message, finish_reason="length" if length else "stop")
    request = decode(include=include)
    events = stream(request, all_deltas, the_answer)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1].type == ("response.incomplete" if length else "response.completed")
    final = events[-1].response
    check_items(events[2:-1], final)
    (back,) = sent_back(final)
    assert canonical(back) == canonical({"role": "assistant", **message})
    order = [(ReasoningDelta, ContentDelta, ToolCallDelta).index(type(delta)) for delta in all_deltas]
    if order == sorted(order):  # what models write
        assert final == encode(request, the_answer)


def check_items(events, final):
    """Every item is opened, filled and closed, one after the other; what its events say is what it is."""
    seen: list[str] = []
    for event in events:
        match event.type:
            case "response.output_item.added":
                assert event.output_index == len(seen)
                assert event.item.status == "in_progress"
                seen.append(event.item.id)
                text, part = "", None
            case "response.content_part.added":
                part = event.part.type
                assert event.part.text == ""
            case "response.output_text.delta" | "response.reasoning_text.delta":
                assert event.type.split(".")[1] == part
                text += event.delta
            case "response.function_call_arguments.delta":
                text += event.delta
            case "response.output_text.done" | "response.reasoning_text.done":
                assert event.text == text
            case "response.function_call_arguments.done":
                assert event.arguments == text
            case "response.content_part.done":
                assert (event.part.type, event.part.text) == (part, text)
            case "response.output_item.done":
                assert event.item == final.output[event.output_index]
                assert event.item.id == seen[-1]
            case other:
                pytest.fail(f"no event of an item: {other}")
        if event.type not in ("response.output_item.added", "response.output_item.done"):
            assert (event.item_id, event.output_index) == (seen[-1], len(seen) - 1)
    assert seen == [item.id for item in final.output]
    assert [event.type for event in events].count("response.output_item.done") == len(seen)


def test_a_response_says_what_it_is_and_what_was_asked():
    request = decode(instructions="be kind", temperature=0.5, tools=[CALC], metadata={"k": "v"}, max_output_tokens=9)
    response = encode(request, answer({"content": "yes", "reasoning_content": "why"}))
    assert (response.id, response.status, response.model) == (f"resp_{ID}", "completed", "m")
    assert [item.type for item in response.output] == ["reasoning", "message"]
    assert response.output_text == "yes"
    assert response.output[0].content[0].text == "why"
    assert response.usage.model_dump() == {
        "input_tokens": 3,
        "input_tokens_details": {"cached_tokens": 2},
        "output_tokens": 2,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 5,
    }
    echo = (response.instructions, response.temperature, response.tools[0].name, response.metadata)
    assert echo == ("be kind", 0.5, "calc", {"k": "v"})
    assert (response.max_output_tokens, response.top_p, response.tool_choice) == (9, None, "auto")


def test_an_answer_cut_short_is_incomplete():
    response = encode(decode(), answer({"content": "ye"}, finish_reason="length"))
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert response.output[0].status == "incomplete"


def test_an_answer_of_reasoning_alone_has_a_message_too():
    response = encode(decode(), answer({"content": None, "reasoning_content": "hm"}))
    assert [item.type for item in response.output] == ["reasoning", "message"]


def test_logprobs_are_there_when_asked_for():
    text = "a\ufffd"
    the_answer = answer({"content": text}, text=text)
    tokens = Tokens(the_answer.tokens.ids, [-0.5, -1.0], [[(-0.5, 97), (-2.0, 98)], [(-1.0, 0xFFFD)]])
    request = decode(include=[LOGPROBS], top_logprobs=2)
    assert (request.logprobs, request.top_logprobs) == (True, 2)
    the_answer = Answer(**{name: getattr(the_answer, name) for name in Answer.__slots__} | {"tokens": tokens})
    first, second = encode(request, the_answer).output[0].content[0].logprobs
    assert (first.token, first.logprob, first.bytes) == ("a", -0.5, [97])
    assert [(top.token, top.logprob) for top in first.top_logprobs] == [("a", -0.5), ("b", -2.0)]
    assert second.bytes == []
    assert encode(decode(), the_answer).output[0].content[0].logprobs == []


def test_a_text_delta_carries_the_logprobs_since_the_last_one():
    request = decode(include=[LOGPROBS])
    encoder = DIALECT.stream(request, header())
    data = encoder.start()
    for text, ids in [("", "<"), ("a", "a"), ("", "b"), ("bc", "c"), ("", ".")]:
        deltas = [ContentDelta(text)] if text else []
        data += encoder.push(0, AnswerDelta(deltas, Tokens([ord(c) for c in ids], [-1.0])))
    data += encoder.finish(0, answer({"content": "abc"}))
    events = events_of(data)
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert ["".join(entry.token for entry in event.logprobs) for event in deltas] == ["<a", "bc"]
    (done,) = [event for event in events if event.type == "response.output_text.done"]
    assert "".join(entry.token for entry in done.logprobs) == "<abc."


def test_a_stream_that_breaks_off_fails_visibly():
    encoder = DIALECT.stream(decode(), header())
    data = encoder.start() + encoder.push(0, AnswerDelta([ReasoningDelta("x"), ContentDelta("a")], Tokens([], [])))
    data += encoder.error(RequestError(502, "the engine died", code="engine_died"))
    *_, failed, error = events_of(data)
    assert (failed.type, failed.response.status, failed.response.error.code) == (
        "response.failed",
        "failed",
        "server_error",
    )
    assert [item.type for item in failed.response.output] == ["reasoning"]  # the message was not finished
    assert (error.code, error.message, error.sequence_number) == (
        "engine_died",
        "the engine died",
        failed.sequence_number + 1,
    )
    assert error.model_extra["error"]["message"] == "the engine died"  # what makes the SDK raise


@pytest.mark.parametrize(
    ("status", "code"), [(400, "invalid_prompt"), (429, "rate_limit_exceeded"), (503, "server_error")]
)
def test_a_failed_response_has_one_of_openais_codes(status, code):
    encoder = DIALECT.stream(decode(), header())
    failed, _ = events_of(encoder.error(RequestError(status, "no", code="why")))
    assert failed.response.error.code == code


def test_items_become_messages():
    request = decode(
        instructions="be kind",
        input=[
            {"role": "developer", "content": "rules"},
            {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
            {
                "type": "reasoning",
                "id": "rs_1",
                "summary": [{"type": "summary_text", "text": "short"}],
                "encrypted_content": "aG0=",
            },
            {
                "type": "message",
                "id": "msg_1",
                "role": "assistant",
                "status": "completed",
                "content": [
                    {"type": "output_text", "text": "let me", "annotations": [], "logprobs": []},
                    {"type": "refusal", "refusal": "!"},
                ],
            },
            {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "calc", "arguments": "{}"},
            {"type": "function_call", "call_id": "c2", "name": "look", "arguments": "{}", "status": None},
            {"type": "function_call_output", "call_id": "c1", "output": "3"},
            {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "4"}]},
        ],
    )
    assert request.has_instructions
    assert request.messages == [
        {"role": "system", "content": "be kind"},
        {"role": "developer", "content": "rules"},
        {"role": "user", "content": "ab"},
        {
            "role": "assistant",
            "content": "let me!",
            "reasoning_content": "hm",
            "tool_calls": [call("c1", "calc", "{}"), call("c2", "look", "{}")],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "3"},
        {"role": "tool", "tool_call_id": "c2", "content": "4"},
    ]
    validate_messages(request.messages)


def user(*parts):
    return [{"role": "user", "content": "q"}, {"role": "user", "content": list(parts)}]


@pytest.mark.parametrize(
    ("items", "param"),
    [
        (user({"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": "x"}), "input[1].content[1]"),
        (user({"type": "input_file", "file_id": "x"}), "input[1].content[0]"),
        (user({"type": "input_text"}), "input[1].content[0]"),
        (user({"type": "input_text", "text": "a", "bold": True}), "input[1].content[0].bold"),
        ([{"type": "computer_call", "call_id": "c"}], "input[0]"),
        ([{"type": "item_reference", "id": "msg_1"}], "input[0]"),
        ([{"type": "web_search_call", "id": "ws_1"}], "input[0]"),
        ([{"type": "custom_tool_call", "call_id": "c", "name": "n", "input": "x"}], "input[0]"),
        ([{"id": "msg_1"}], "input[0]"),
        ([{"role": "robot", "content": "x"}], "input[0].role"),
        ([{"role": "user", "content": "x", "name": "bob"}], "input[0].name"),
        ([{"type": "function_call", "call_id": "", "name": "f", "arguments": ""}], "input[0].call_id"),
        ([{"type": "function_call", "call_id": "c", "name": "f", "arguments": {}}], "input[0].arguments"),
        (
            [{"type": "function_call_output", "call_id": "c", "output": [{"type": "input_video", "file_id": "x"}]}],
            "input[0].output[0]",
        ),
        (
            [{"type": "reasoning", "id": "rs", "summary": [], "encrypted_content": "gAAAA-_x"}],
            "input[0].encrypted_content",
        ),
        ([{"type": "reasoning", "id": "rs", "summary": [], "encrypted_content": "/w=="}], "input[0].encrypted_content"),
    ],
)
def test_invalid_items_are_refused_with_their_place(items, param):
    error = refusal(input=items)
    assert (error.status, error.code, error.param) == (400, "invalid_messages", param)
    assert param in str(error)


def test_what_a_tools_output_holds_besides_text_is_replaced_by_a_text():
    """Codex's `view_image` answers with an image."""
    parts = [
        {"type": "input_text", "text": "See "},
        {"type": "input_image", "image_url": "data:image/png;base64,AA==", "detail": "auto"},
        {"type": "input_file", "file_id": "x", "filename": "a.pdf"},
    ]
    items = [
        {"type": "function_call", "call_id": "c", "name": "view_image", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": parts},
    ]
    assert decode(input=items).messages[-1]["content"] == f"See {UNREAD}{UNREAD}"


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"temprature": 1}, 400, "temprature"),
        ({"temperature": "hot"}, 400, "temperature"),
        ({"top_p": 0}, 400, "top_p"),
        ({"max_output_tokens": 0}, 400, "max_output_tokens"),
        ({"n": 2}, 400, "n"),
        ({"stop": ["x"]}, 400, "stop"),
        ({"input": None}, 400, "input"),
        ({"input": ""}, 400, "input"),
        ({"input": []}, 400, "input"),
        ({"input": [3]}, 400, "input[0]"),
        ({"background": True}, 400, "background"),
        ({"truncation": "auto"}, 400, "truncation"),
        ({"conversation": "conv_1"}, 400, "conversation"),
        ({"prompt": {"id": "pmpt_1"}}, 400, "prompt"),
        ({"max_tool_calls": 3}, 400, "max_tool_calls"),
        ({"reasoning": {"depth": 1}}, 400, "reasoning.depth"),
        ({"text": {"verbosity": "low"}}, 400, "text.verbosity"),
        ({"text": {"format": {"type": "grammar"}}}, 400, "text.format"),
        ({"text": {"format": {"type": "json_schema"}}}, 400, "text.format"),
        ({"include": ["file_search_results"]}, 400, "include"),
        ({"top_logprobs": 2}, 400, "top_logprobs"),
        ({"top_logprobs": 21, "include": [LOGPROBS]}, 400, "top_logprobs"),
        ({"previous_response_id": "resp_1"}, 400, "previous_response_id"),
        ({"previous_response_id": ID}, 400, "previous_response_id"),
        ({"tools": [{"type": "web_serch"}]}, 400, "tools[0].type"),
        ({"tools": [CALC, {"type": "custom", "name": "x"}]}, 400, "tools[1].type"),
        ({"tools": [{**CALC, "async": True}]}, 400, "tools[0].async"),
        ({"tools": [{**CALC, "allowed_callers": ["programmatic"]}]}, 400, "tools[0].allowed_callers"),
        ({"tools": [{"type": "namespace", "tools": []}]}, 400, "tools[0].name"),
        ({"tools": [{"type": "namespace", "name": "n"}]}, 400, "tools[0].tools"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "custom"}]}]}, 400, "tools[0].tools[0].type"),
        ({"tools": [{**CALC, "name": "n__calc"}, {"type": "namespace", "name": "n", "tools": [CALC]}]}, 400, "tools"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, 400, "tool_choice"),
        ({"tools": [CALC, {"type": "web_search"}], "tool_choice": {"type": "web_search"}}, 400, "tool_choice"),
        ({"tools": [{"type": "function"}]}, 400, "tools[0].name"),
        ({"tools": [{**CALC, "parameters": 3}]}, 400, "tools[0].parameters"),
        ({"messages": []}, 400, "messages"),
        ({"tools": [{**CALC, "strict": 1}]}, 400, "tools[0].strict"),
        ({"metadata": {"a": None}}, 400, "metadata[...]"),
        ({"tool_choice": "required"}, 400, "tool_choice"),
        ({"tools": [CALC], "tool_choice": "sometimes"}, 400, "tool_choice"),
        ({"tools": [CALC], "tool_choice": {"type": "function", "name": "look"}}, 400, "tool_choice"),
        ({"tools": [CALC], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, 400, "tool_choice"),
    ],
)
def test_bad_parameters_are_refused_by_name(fields, status, param):
    error = refusal(**fields)
    assert (error.status, error.param) == (status, param)


@pytest.mark.parametrize(
    "fields",
    [
        {"user": "me", "metadata": {"a": "b"}, "store": False, "service_tier": "flex", "prompt_cache_key": "k"},
        {"safety_identifier": "s", "prompt_cache_retention": "24h", "truncation": "disabled", "background": False},
        {"reasoning": {"summary": "auto"}, "text": {"verbosity": "medium", "format": {"type": "text"}}},
        {"stream_options": {"include_obfuscation": False}, "tools": [], "tool_choice": "auto", "instructions": ""},
        {"temperature": None, "top_logprobs": None, "include": [], "prompt_cache_options": {"mode": "implicit"}},
    ],
)
def test_harmless_parameters_change_nothing(fields):
    request, plain = decode(**fields), decode()
    differing = [name for name in type(plain).__slots__ if getattr(request, name) != getattr(plain, name)]
    assert set(differing) <= {"kept", "wire"}


def test_sampling_tools_and_format_are_decoded():
    tool = {**CALC, "description": "adds", "strict": True, "defer_loading": None}
    request = decode(
        tools=[tool],
        tool_choice={"type": "function", "name": "calc"},
        parallel_tool_calls=False,
        temperature=0.5,
        top_p=0.9,
        max_output_tokens=5,
        stream=True,
        previous_response_id=f"resp_{ID}",
        model="x",
        text={"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}},
    )
    function = {"name": "calc", "parameters": CALC["parameters"], "description": "adds", "strict": True}
    assert request.tools == [{"type": "function", "function": function}]
    assert request.tool_choice == Named("calc")
    assert not request.parallel_tool_calls
    assert request.sampling == {"temperature": 0.5, "top_p": 0.9}
    assert request.constraint == {"json_schema": '{"type":"object"}'}
    assert (request.max_tokens, request.stream, request.previous_id, request.model) == (5, True, ID, "x")


def test_an_error_is_in_openais_shape():
    body = json.loads(DIALECT.encode_error(refusal(temperature=3)))
    assert (body["error"]["type"], body["error"]["param"]) == ("invalid_request_error", "temperature")


def test_ids_are_the_same_streamed_or_not_and_differ_within_a_response():
    deltas = with_calls([ReasoningDelta("r"), ContentDelta("c"), ReasoningDelta("s")], [("calc", "{}")] * 2)
    ids = [item.id for item in stream(decode(), deltas, answer(message_from(deltas)))[-1].response.output]
    assert len(set(ids)) == len(ids) == 5
    assert [id.split("_")[0] for id in ids] == ["rs", "msg", "rs", "fc", "fc"]


SPACE = {
    "type": "namespace",
    "name": "agents",
    "description": "Other agents.",
    "tools": [{**CALC, "name": "spawn", "description": "Start one."}, {**CALC, "name": "wait"}],
}


class TestTools:
    def test_a_namespace_becomes_functions_and_built_in_tools_are_left_out(self):
        request = decode(tools=[CALC, SPACE, {"type": "web_search"}, {"type": "web_search_preview_2025_03_11"}])
        assert [tool["function"]["name"] for tool in request.tools] == ["calc", "agents__spawn", "agents__wait"]
        assert request.tools[1]["function"]["description"] == "agents: Other agents.\n\nStart one."
        assert "description" not in request.tools[2]["function"]
        assert request.left_out == ["web_search", "web_search_preview_2025_03_11"]

    def test_without_functions_there_are_no_tools(self):
        request = decode(tools=[{"type": "web_search"}, {"type": "file_search", "vector_store_ids": ["v"]}])
        assert (request.tools, request.left_out) == (None, ["web_search", "file_search"])

    def test_what_changes_nothing_for_a_policy_is_dropped_from_a_function(self):
        plain = decode(tools=[CALC]).tools
        assert (
            plain
            == decode(
                tools=[
                    {**CALC, "defer_loading": True, "output_schema": {}, "async": False, "allowed_callers": ["direct"]}
                ]
            ).tools
        )

    @pytest.mark.parametrize("name", ["calc", "agents__spawn", "made_up"])
    def test_a_call_goes_out_with_its_namespace_and_comes_back_as_it_was_sampled(self, name):
        request = decode(tools=[CALC, SPACE])
        the_answer = answer({"content": None, "tool_calls": [call("call_0", name, "{}")]})
        whole = json.loads(DIALECT.encode(request, header(), [the_answer]))
        encoder = DIALECT.stream(request, header())
        delta = encoder.push(0, AnswerDelta([ToolCallDelta(0, "call_0", name, "{}")], the_answer.tokens))
        data = encoder.start() + delta + encoder.finish(0, the_answer) + encoder.end([the_answer])
        events = [json.loads(line[6:]) for line in data.decode().splitlines() if line.startswith("data: ")]
        expected = ("agents", "spawn") if name == "agents__spawn" else (None, name)
        items = [event["item"] for event in events if event["type"].startswith("response.output_item")]
        assert len(items) == 2
        for item in (*whole["output"], *items):
            assert (item.get("namespace"), item["name"]) == expected
        assert events[-1]["response"] == whole
        (back,) = decode(input=[{"role": "user", "content": "q"}, *whole["output"]]).messages[1:]
        assert back["tool_calls"] == the_answer.message["tool_calls"]

    def test_a_function_of_a_namespace_can_be_required(self):
        request = decode(tools=[SPACE], tool_choice={"type": "function", "namespace": "agents", "name": "wait"})
        assert request.tool_choice == Named("agents__wait")

    def test_a_namespace_that_ends_with_the_joint_has_it_once(self):
        request = decode(tools=[SPACE | {"name": "mcp__files__"}])
        assert request.tools[0]["function"]["name"] == "mcp__files__spawn"

    def test_codexs_own_fields_change_nothing(self):
        extra = {"client_metadata": {"turn_id": "t"}, "prompt_cache_key": "k", "reasoning": {"summary": "auto"}}
        plain, spelled = decode(), decode(**extra)
        assert (spelled.messages, spelled.sampling, spelled.tools) == (plain.messages, plain.sampling, plain.tools)
        assert "client_metadata" not in spelled.kept
        items = [
            {"type": "message", "role": "assistant", "phase": "final_answer", "content": "so"},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "caller": {"type": "direct"}},
            {"type": "function_call_output", "call_id": "c", "output": "1", "name": "f", "caller": {"type": "direct"}},
        ]
        assert [message["role"] for message in decode(input=items).messages] == ["assistant", "tool"]

    def test_reasoning_that_comes_back_sealed_alone_is_the_same(self):
        sealed = encode(decode(include=[ENCRYPTED]), answer({"content": "so", "reasoning_content": "hm"})).output[0]
        item = {"type": "reasoning", "id": "rs", "summary": [], "encrypted_content": sealed.encrypted_content}
        for spelled in (item, item | {"content": None}, item | {"content": []}):
            (turn,) = decode(input=[spelled]).messages
            assert turn["reasoning_content"] == "hm"

    def test_a_refused_tool_type_names_a_substitute(self):
        assert "give a function with one string" in str(refusal(tools=[{"type": "custom", "name": "x"}]))
        assert "did you mean 'function'?" in str(refusal(tools=[{**CALC, "type": "functon"}]))
