"""Errors in each dialect's own names, and hints that help."""

import json

import pytest

from agentrl.errors import RequestError
from agentrl.proxy.dialects import DIALECTS, MESSAGES

from .contract.clients import CLIENTS

CHAT, COMPLETIONS, RESPONSES = (DIALECTS[f"/v1/{path}"] for path in ("chat/completions", "completions", "responses"))


def refusal(dialect, **fields) -> RequestError:
    return CLIENTS[dialect.name].refusal(**fields)


def said(dialect, error):
    body = json.loads(dialect.encode_error(error))["error"]
    return body["message"], body.get("param") or body.get("details", {}).get("param")


@pytest.mark.parametrize(
    ("dialect", "name", "of_format"),
    [
        (CHAT, "messages", "response_format"),
        (COMPLETIONS, "prompt", None),
        (RESPONSES, "input", "text.format"),
        (MESSAGES, "messages", "output_config.format"),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_parameters_have_the_dialects_names(dialect, name, of_format):
    too_long = RequestError(400, "too long", code="context_length_exceeded", param="messages")
    assert said(dialect, too_long) == ("too long", name)
    if of_format is not None:
        rejected = RequestError(
            400,
            "the engine refused the request: the engine refused the request: Failed to compile json grammar: "
            '[15:01:06] /project/cpp/json_schema_converter.cc:4175: Unsupported type "objekt"\n',
            code="engine_rejected",
        )
        expected = 'the engine refused the request: Failed to compile json grammar: Unsupported type "objekt"'
        assert said(dialect, rejected) == (expected, of_format)


def test_an_engine_refusal_without_a_grammar_names_no_parameter():
    assert said(CHAT, RequestError(400, "the engine refused the request: no", code="engine_rejected"))[1] is None


def test_a_suggestion_is_a_near_name_that_is_supported():
    assert str(refusal(RESPONSES, stop="x")) == "parameter 'stop' is not supported"
    assert "did you mean 'max_output_tokens'?" in str(refusal(RESPONSES, max_tokens=3))
    for dialect, name in [
        (COMPLETIONS, "sufix"),
        (RESPONSES, "backgroud"),
        (RESPONSES, "conversatio"),
        (RESPONSES, "promptt"),
        (RESPONSES, "max_tool_call"),
        (MESSAGES, "thred"),
        (CHAT, "function_cal"),
    ]:
        assert str(refusal(dialect, **{name: 1})) == f"parameter {name!r} is not supported"


@pytest.mark.parametrize("dialect", [CHAT, RESPONSES], ids=lambda dialect: dialect.name)
def test_an_unknown_tool_choice_lists_the_known_ones(dialect):
    told = str(refusal(dialect, tool_choice={"type": "allowed_tools"}))
    assert '\'allowed_tools\' is not supported; choose auto, none, required or {"type": "function"' in told
    told = str(refusal(MESSAGES, tool_choice={"type": "required"}))
    assert told == "tool_choice: the type 'required' is not supported here; choose auto, any, tool or none"


@pytest.mark.parametrize("dialect", [CHAT, COMPLETIONS], ids=lambda dialect: dialect.name)
@pytest.mark.parametrize("seed", [2**70, 2**63, -(2**63)])
def test_a_seed_out_of_bounds_is_refused_by_name(dialect, seed):
    error = refusal(dialect, seed=seed)
    assert (error.status, error.param) == (400, "seed")
    assert "must be" in str(error) or "expected" in str(error).lower()


def test_an_integer_over_64_bits_is_refused_with_its_place():
    error = refusal(CHAT, metadata={"a": [1, {"b": 2**70}]})
    assert (error.status, error.param) == (400, "metadata.a[1].b")
    assert str(error) == "metadata.a[1].b: this integer has more than 64 bits"


@pytest.mark.parametrize(
    ("content", "param"), [("\ud800", "messages[0].content"), ("a \udc00 b", "messages[0].content")]
)
def test_an_unpaired_surrogate_is_refused_with_its_place(content, param):
    error = refusal(CHAT, messages=[{"role": "user", "content": content}])
    assert (error.status, error.param) == (400, param)
    assert "surrogate" in str(error)


class TestResults:
    """Results of tools that no call asked for."""

    def test_chat(self):
        call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        error = refusal(
            CHAT,
            messages=[
                {"role": "user", "content": "x"},
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "a", "content": "1"},
                {"role": "tool", "tool_call_id": "b", "content": "2"},
            ],
        )
        assert (error.status, error.param) == (400, "messages[3].tool_call_id")
        assert "no tool call before it has the id 'b'" in str(error)

    def test_responses(self):
        items = [
            {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "b", "output": "1"},
        ]
        error = refusal(RESPONSES, input=items)
        assert (error.status, error.param) == (400, "input[1].call_id")
        earlier = {"input": items, "previous_response_id": "resp_" + "0" * 32}
        assert RESPONSES.decode(json.dumps(earlier).encode()).previous_id == "0" * 32

    def test_messages(self):
        error = refusal(
            MESSAGES,
            messages=[
                {"role": "user", "content": "x"},
                {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]},
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "so"},
                        {"type": "tool_result", "tool_use_id": "b", "content": "1"},
                    ],
                },
            ],
        )
        assert (error.status, error.param) == (400, "messages[2].content[1].tool_use_id")

    def test_histories_that_were_cut_short_may_begin_with_results(self):
        body = {
            "messages": [{"role": "tool", "tool_call_id": "gone", "content": "1"}, {"role": "user", "content": "x"}]
        }
        assert len(CHAT.decode(json.dumps(body).encode()).messages) == 2
