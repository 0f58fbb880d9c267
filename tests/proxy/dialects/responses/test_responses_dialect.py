"""Answers in Responses: the items, usage and logprobs of an answer, and errors."""

import json

from hypothesis import given
from hypothesis import strategies as st

from agentrl.proxy.dialects.model_answer import Answer, Tokens
from agentrl.rendering.conversation import canonical
from agentrl.rendering.validation import validate_messages

from .response_samples import (
    CALC,
    CALLS,
    DELTAS,
    DIALECT,
    ENCRYPTED,
    ID,
    LOGPROBS,
    answer,
    decode,
    encode,
    message_from,
    refusal,
    sent_back,
    with_calls,
)


@given(deltas=DELTAS, calls=CALLS, include=st.sampled_from([None, [ENCRYPTED]]))
def test_a_delivered_answer_sent_back_is_the_same_message(deltas, calls, include):
    message = message_from(with_calls(deltas, calls))
    (back,) = sent_back(encode(decode(include=include), answer(message)))
    validate_messages([back])
    assert canonical(back) == canonical({"role": "assistant", **message})
    assert back.get("reasoning_content") == message.get("reasoning_content")


def test_a_response_has_its_status_usage_and_the_parameters_of_the_request():
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


def test_an_error_is_in_openais_shape():
    body = json.loads(DIALECT.encode_error(refusal(temperature=3)))
    assert (body["error"]["type"], body["error"]["param"]) == ("invalid_request_error", "temperature")
