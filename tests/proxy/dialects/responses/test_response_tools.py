"""Tools of Responses: functions, namespaces, and the types that the proxy leaves out or refuses."""

import json

import pytest

from agentrl.proxy.dialects.model_answer import AnswerDelta
from agentrl.proxy.dialects.model_request import Named
from agentrl.rendering import ToolCallDelta

from .response_samples import CALC, DIALECT, answer, call, decode, header, refusal

SPACE = {
    "type": "namespace",
    "name": "agents",
    "description": "Other agents.",
    "tools": [{**CALC, "name": "spawn", "description": "Start one."}, {**CALC, "name": "wait"}],
}


def test_a_namespace_becomes_functions_and_built_in_tools_are_left_out():
    request = decode(tools=[CALC, SPACE, {"type": "web_search"}, {"type": "web_search_preview_2025_03_11"}])
    assert [tool["function"]["name"] for tool in request.tools] == ["calc", "agents__spawn", "agents__wait"]
    assert request.tools[1]["function"]["description"] == "agents: Other agents.\n\nStart one."
    assert "description" not in request.tools[2]["function"]
    assert request.left_out == ["web_search", "web_search_preview_2025_03_11"]


def test_without_functions_there_are_no_tools():
    request = decode(tools=[{"type": "web_search"}, {"type": "file_search", "vector_store_ids": ["v"]}])
    assert (request.tools, request.left_out) == (None, ["web_search", "file_search"])


def test_fields_without_effect_are_dropped_from_a_function():
    plain = decode(tools=[CALC]).tools
    assert (
        plain
        == decode(
            tools=[{**CALC, "defer_loading": True, "output_schema": {}, "async": False, "allowed_callers": ["direct"]}]
        ).tools
    )


@pytest.mark.parametrize("name", ["calc", "agents__spawn", "made_up"])
def test_a_call_is_delivered_with_its_namespace_and_read_back_as_sampled(name):
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


def test_a_function_of_a_namespace_can_be_required():
    request = decode(tools=[SPACE], tool_choice={"type": "function", "namespace": "agents", "name": "wait"})
    assert request.tool_choice == Named("agents__wait")


def test_the_separator_after_a_namespace_is_not_doubled():
    request = decode(tools=[SPACE | {"name": "mcp__files__"}])
    assert request.tools[0]["function"]["name"] == "mcp__files__spawn"


def test_a_refused_tool_type_names_a_substitute():
    assert "give a function with one string" in str(refusal(tools=[{"type": "custom", "name": "x"}]))
    assert "did you mean 'function'?" in str(refusal(tools=[{**CALC, "type": "functon"}]))
