"""Every parameter is supported, harmless, or refused by name."""

import json

import pytest

from agentrl.errors import RequestError
from agentrl.proxy.dialects.openai_chat import OpenAIChat

decode = OpenAIChat().decode

MESSAGES = [{"role": "user", "content": "hi"}]


def refusal(**fields) -> RequestError:
    with pytest.raises(RequestError) as caught:
        decode(json.dumps({"messages": MESSAGES, **fields}).encode())
    return caught.value


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"temprature": 1}, 422, "temprature"),
        ({"temperature": "hot"}, 422, "temperature"),
        ({"temperature": 3}, 422, "temperature"),
        ({"n": 2}, 422, "n"),
        ({"logit_bias": {"1": 5}}, 422, "logit_bias"),
        ({"response_format": {"type": "json_object"}}, 422, "response_format"),
        ({"tool_choice": "required"}, 422, "tool_choice"),
        ({"tools": [{"type": "function"}]}, 422, "tools[0]"),
        ({"max_tokens": 0}, 422, "max_tokens"),
        ({"stop": [""]}, 422, "stop"),
        ({"stream": "yes"}, 422, "stream"),
        ({"messages": []}, 400, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, 400, "messages[0].role"),
    ],
)
def test_bad_parameters_are_refused_by_name(fields, status, param):
    error = refusal(**fields)
    assert (error.status, error.param) == (status, param)


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
