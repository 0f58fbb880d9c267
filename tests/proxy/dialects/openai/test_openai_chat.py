"""Every parameter is supported, harmless, or refused by name."""

import json

import pytest

from agentrl.domain.schemas import UNREAD
from agentrl.errors import RequestError
from agentrl.proxy.dialects.model_answer import Answer, ResponseHeader, Tokens
from agentrl.proxy.dialects.model_request import Named
from agentrl.proxy.dialects.openai.openai_chat import OpenAIChat
from agentrl.rendering.validation import validate_messages

decode = OpenAIChat().decode

MESSAGES = [{"role": "user", "content": "hi"}]


def refusal(**fields) -> RequestError:
    with pytest.raises(RequestError) as caught:
        decode(json.dumps({"messages": MESSAGES, **fields}).encode())
    return caught.value


TOOL = {"type": "function", "function": {"name": "calc", "parameters": {"type": "object", "properties": {}}}}


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"temprature": 1}, 400, "temprature"),
        ({"temperature": "hot"}, 400, "temperature"),
        ({"temperature": 3}, 400, "temperature"),
        ({"top_p": 0}, 400, "top_p"),
        ({"top_k": 0}, 400, "top_k"),
        ({"n": 0}, 400, "n"),
        ({"logit_bias": {"a": 5}}, 400, "logit_bias"),
        ({"logit_bias": {"1": 500}}, 400, "logit_bias"),
        ({"response_format": {"type": "xml"}}, 400, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, 400, "response_format"),
        ({"top_logprobs": 2}, 400, "top_logprobs"),
        ({"top_logprobs": 21, "logprobs": True}, 400, "top_logprobs"),
        ({"tool_choice": "required"}, 400, "tool_choice"),
        ({"tool_choice": "sometimes", "tools": [TOOL]}, 400, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "cals"}}, "tools": [TOOL]}, 400, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools"}, "tools": [TOOL]}, 400, "tool_choice"),
        ({"tools": [{"type": "function"}]}, 400, "tools[0].function"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"max_completion_tokens": 1.5}, 400, "max_completion_tokens"),
        ({"max_completion_tokens": 5, "max_tokens": 6}, 400, "max_tokens"),
        ({"functions": [TOOL["function"]]}, 400, "functions"),
        ({"function_call": "auto"}, 400, "function_call"),
        ({"modalities": ["text", "audio"]}, 400, "modalities"),
        ({"audio": {"voice": "alloy"}}, 400, "audio"),
        ({"prediction": {"type": "content", "content": "x"}}, 400, "prediction"),
        ({"verbosity": "brief"}, 400, "verbosity"),
        ({"web_search_options": {}}, 400, "web_search_options"),
        ({"stop": [""]}, 400, "stop"),
        ({"stop": [str(i) for i in range(33)]}, 400, "stop"),
        ({"stream": "yes"}, 400, "stream"),
        ({"stream_options": {"include_cost": True}}, 400, "stream_options.include_cost"),
        ({"messages": []}, 400, "messages"),
        ({"messages": "hi"}, 400, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, 400, "messages[0].role"),
    ],
)
def test_bad_parameters_are_refused_by_name(fields, status, param):
    error = refusal(**fields)
    assert (error.status, error.param) == (status, param)


def test_non_text_parts_of_a_tool_result_are_replaced_by_a_text():
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    words = {"type": "text", "text": "See "}
    result = {"role": "tool", "tool_call_id": "c", "content": [words, image]}
    found = OpenAIChat().decode(json.dumps({"messages": [{"role": "user", "content": "hi"}, result]}).encode()).messages
    assert found[-1] == result | {"content": [words, {"type": "text", "text": UNREAD}]}
    validate_messages(found)
    with pytest.raises(RequestError, match="'image_url' are not supported"):
        OpenAIChat().decode(json.dumps({"messages": [{"role": "user", "content": [image]}]}).encode())


def test_a_message_without_reasoning_has_it_as_null():
    """As SGLang and vLLM have it, so that programs may read the attribute of the SDK's object."""
    dialect = OpenAIChat()
    request = dialect.decode(json.dumps({"messages": MESSAGES}).encode())
    header = ResponseHeader(id="0" * 32, created=7, model="m", prompt_tokens=3, decode=lambda ids: "a")
    answer = Answer(
        interaction_id="0" * 32,
        message={"role": "assistant", "content": "a"},
        finish_reason="stop",
        stop=None,
        prompt_ids=[1],
        cached_tokens=0,
        tokens=Tokens([1], [-0.5]),
        versions=[[0, 0, 1]],
    )
    message = json.loads(dialect.encode(request, header, [answer]))["choices"][0]["message"]
    first = json.loads(dialect.stream(request, header).start().removeprefix(b"data: "))["choices"][0]["delta"]
    assert message == {"role": "assistant", "content": "a", "reasoning_content": None}
    assert first == {"role": "assistant", "content": "", "reasoning_content": None}
    history = [*MESSAGES, message, *MESSAGES]
    assert dialect.decode(json.dumps({"messages": history}).encode()).messages[1]["content"] == "a"


def test_two_names_of_the_token_budget_must_agree():
    both = {"messages": MESSAGES, "max_tokens": 5, "max_completion_tokens": 5}
    assert decode(json.dumps(both).encode()).max_tokens == 5
    assert "give one of them" in str(refusal(max_tokens=5, max_completion_tokens=6))


def test_a_refused_parameter_names_its_replacement():
    assert str(refusal(functions=[])) == "functions is not supported: use tools"


def test_a_misspelt_parameter_names_the_nearest():
    assert "did you mean 'temperature'?" in str(refusal(temprature=1))


def test_malformed_json_is_a_400():
    with pytest.raises(RequestError) as caught:
        decode(b"{")
    assert (caught.value.status, caught.value.code) == (400, "invalid_json")


def test_nulls_are_absent_and_defaults_are_empty():
    request = decode(json.dumps({"messages": MESSAGES, "temperature": None, "stop": None, "tools": []}).encode())
    assert request.sampling == {}
    assert request.tools is None
    assert not request.stream


@pytest.mark.parametrize(
    "fields",
    [
        {"user": "me", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "safety_identifier": "s"},
        {"prompt_cache_key": "k", "prompt_cache_retention": "24h", "prompt_cache_options": {"mode": "implicit"}},
        {"modalities": ["text"], "verbosity": "medium", "functions": None, "reasoning": {"max_tokens": 9}},
        {"user": "me", "verbosity": "low"},
        {"user": "me", "verbosity": "high"},
    ],
)
def test_harmless_parameters_change_nothing(fields):
    plain = decode(json.dumps({"messages": MESSAGES}).encode())
    request = decode(json.dumps({"messages": MESSAGES, **fields}).encode())
    assert [name for name in type(plain).__slots__ if getattr(request, name) != getattr(plain, name)] == ["wire"]


def test_sampling_parameters_reach_the_engine_request():
    body = {
        "messages": MESSAGES,
        "temperature": 0.5,
        "top_k": 5,
        "logit_bias": {"7": 3},
        "seed": 4,
        "n": 3,
        "max_completion_tokens": 9,
        "stop": "x",
        "logprobs": True,
        "top_logprobs": 2,
        "parallel_tool_calls": False,
        "tools": [TOOL],
        "tool_choice": {"type": "function", "function": {"name": "calc"}},
    }
    request = decode(json.dumps(body).encode())
    assert request.sampling == {"temperature": 0.5, "top_k": 5, "logit_bias": {"7": 3.0}}
    assert (request.seed, request.n, request.max_tokens, request.stop) == (4, 3, 9, ["x"])
    assert (request.logprobs, request.top_logprobs, request.parallel_tool_calls) == (True, 2, False)
    assert request.tool_choice == Named("calc")


@pytest.mark.parametrize(
    ("format", "schema"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, {"type": "object"}),
        ({"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "array"}}}, {"type": "array"}),
    ],
)
def test_response_formats_become_the_engines_grammar(format, schema):
    constraint = decode(json.dumps({"messages": MESSAGES, "response_format": format}).encode()).constraint
    assert (json.loads(constraint["json_schema"]) if constraint else None) == schema
