"""Parameters of OpenAI's dialects, field by field: taken, neutral, or refused by name."""

import json
import subprocess
import sys
from typing import Any

import pytest
from parameters import LISTED, OF_OPENAI

from agentrl.errors import RequestError
from agentrl.proxy.dialects.neutral_fields import OF_SERVERS, Neutral

from .contract.clients import CLIENTS

FIELDS = [(dialect, field) for dialect, table in OF_OPENAI.items() for field in table]
NEUTRAL = [
    *({name: value} for name, neutral in OF_SERVERS.items() for value in neutral.values),
    {"repetition_penalty": 1.0, "ignore_eos": False, "skip_special_tokens": True, "best_of": 1},
    {"stream_options": {"include_usage": True, "continuous_usage_stats": False}},
]
"""What clients of other servers spell out."""


def decode(dialect: str, **fields: Any) -> Any:
    return CLIENTS[dialect].decode(**fields)


def refusal(dialect: str, **fields: Any) -> RequestError:
    return CLIENTS[dialect].refusal(**fields)


@pytest.mark.parametrize(("dialect", "field"), FIELDS)
def test_a_parameter_is_taken_or_refused_by_name(dialect, field):
    taken, refused = OF_OPENAI[dialect][field]
    decode(dialect, **{field: taken})
    if refused is not None:
        error = refusal(dialect, **{field: refused})
        assert error.status == 400
        assert (error.param or "").startswith(field)


@pytest.mark.parametrize("dialect", OF_OPENAI)
def test_every_parameter_of_the_installed_sdk_is_listed(dialect):
    listed = subprocess.run([sys.executable, "-c", LISTED], capture_output=True, text=True, check=True).stdout
    assert set(json.loads(listed)[dialect]) <= set(OF_OPENAI[dialect])


@pytest.mark.parametrize("fields", NEUTRAL, ids=str)
@pytest.mark.parametrize("dialect", ["openai.chat", "openai.completions"])
def test_a_neutral_value_equals_an_absent_parameter(dialect, fields):
    asked, plain = decode(dialect, **fields), decode(dialect)
    assert (asked.sampling, asked.constraint, asked.stop, asked.n) == (plain.sampling, plain.constraint, [], 1)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"repetition_penalty": 1.1}, "repetition_penalty other than 1 is not supported: use frequency_penalty or"),
        ({"ignore_eos": True}, "ignore_eos other than false is not supported"),
        ({"ignore_eos": 0}, "ignore_eos other than false is not supported"),
        ({"repetition_penalty": True}, "repetition_penalty other than 1 is not supported"),
        ({"skip_special_tokens": False}, "skip_special_tokens other than true is not supported"),
        ({"best_of": 2}, "best_of"),
        ({"stream_options": {"continuous_usage_stats": True}}, "stream_options.continuous_usage_stats other"),
    ],
)
@pytest.mark.parametrize("dialect", ["openai.chat", "openai.completions"])
def test_a_value_that_is_not_neutral_is_refused_and_the_error_names_the_neutral_values(dialect, fields, message):
    error = refusal(dialect, **fields)
    assert (error.status, error.code) == (400, "unsupported_parameter")
    assert str(error).startswith(message)


def test_openrouters_names_of_effort_and_usage_are_accepted():
    asked = decode("openai.chat", reasoning={"effort": "high", "exclude": False}, usage={"include": True}, stream=True)
    assert asked.wire.usage.include
    assert refusal("openai.chat", reasoning={"exclude": True}).param == "reasoning.exclude"


@pytest.mark.parametrize(
    ("dialect", "fields", "thinks"),
    [
        ("openai.chat", {}, None),
        ("openai.chat", {"reasoning_effort": "none"}, False),
        ("openai.chat", {"reasoning_effort": "low"}, True),
        ("openai.chat", {"reasoning": {"effort": "none"}}, False),
        ("openai.chat", {"reasoning": {"effort": "high"}}, True),
        ("openai.chat", {"reasoning": {"enabled": False}}, False),
        ("openai.chat", {"reasoning": {"max_tokens": 9}}, None),
        ("openai.chat", {"reasoning_effort": "none", "reasoning": {"enabled": True}}, False),
        ("openai.responses", {"input": "a"}, None),
        ("openai.responses", {"input": "a", "reasoning": {"summary": "auto"}}, None),
        ("openai.responses", {"input": "a", "reasoning": {"effort": "none"}}, False),
        ("openai.responses", {"input": "a", "reasoning": {"effort": "medium"}}, True),
    ],
)
def test_the_effort_decides_whether_the_model_thinks(dialect, fields, thinks):
    assert decode(dialect, **fields).thinks is thinks


@pytest.mark.parametrize(
    ("dialect", "name", "meant"),
    [
        ("openai.chat", "max_output_tokens", "max_tokens"),
        ("openai.chat", "max_new_tokens", "max_tokens"),
        ("openai.chat", "stop_sequences", "stop"),
        ("openai.chat", "input", "messages"),
        ("openai.chat", "thinking", "reasoning_effort"),
        ("openai.chat", "temprature", "temperature"),
        ("openai.chat", "toolchoice", "tool_choice"),
        ("openai.chat", "frequence_penalty", "frequency_penalty"),
        ("openai.completions", "messages", "prompt"),
        ("openai.responses", "max_tokens", "max_output_tokens"),
        ("openai.responses", "messages", "input"),
        ("openai.responses", "response_format", "text"),
        ("openai.responses", "system", "instructions"),
        ("openai.chat", "mirostat_tau", None),  # a word of its own, however near another is
        ("openai.chat", "return_text_ids", None),
        ("openai.chat", "dry_penalty", None),
        ("openai.responses", "stop", None),
        ("openai.responses", "parallel_calls", None),
    ],
)
def test_an_unknown_parameter_suggests_the_nearest_name_if_one_is_near(dialect, name, meant):
    said = str(refusal(dialect, **{name: 1}))
    assert said == f"parameter {name!r} is not supported" + (f"; did you mean {meant!r}?" if meant else "")


def test_a_neutral_number_does_not_match_a_boolean():
    neutral = Neutral((1, False), "why")
    assert [neutral.holds(value) for value in (1, 1.0, False, True, 0, "1")] == [True, True, True, False, False, False]
    assert Neutral((), "use x").refusal("a") == "a is not supported: use x"
