"""Parameters of Responses: decoded, without effect, or refused by name."""

import pytest

from agentrl.proxy.dialects.model_request import Named

from .response_samples import CALC, ID, LOGPROBS, decode, refusal


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
        ({"text": {"verbosity": "brief"}}, 400, "text.verbosity"),
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
        {"text": {"verbosity": "low"}},  # the OpenAI Agents SDK sends it for an agent without a model's name
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


def test_codexs_own_fields_change_nothing():
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
