"""Completions: prompts of every kind, choices of several prompts, logprobs, and every parameter known or refused."""

import json

import pytest
from openai.types import Completion

from agentrl.errors import RequestError
from agentrl.proxy.dialects.model_answer import Answer, AnswerDelta, ResponseHeader, Tokens
from agentrl.proxy.dialects.openai.openai_completions import OpenAICompletions
from agentrl.rendering import ContentDelta

DIALECT = OpenAICompletions()
HEADER = ResponseHeader(id="0" * 32, created=7, model="m", prompt_tokens=3, decode=lambda ids: "".join(map(chr, ids)))


def decode(**fields):
    return DIALECT.decode(json.dumps({"prompt": "hi", **fields}).encode())


def refusal(**fields) -> RequestError:
    with pytest.raises(RequestError) as caught:
        decode(**fields)
    return caught.value


def tokens(text, top=None):
    return Tokens([ord(c) for c in text], [-0.5] * len(text), top)


def answer(text, *, id="0" * 32, prompt=(1, 2, 3), finish_reason="stop", top=None) -> Answer:
    return Answer(
        interaction_id=id,
        message={"role": "assistant", "content": text},
        finish_reason=finish_reason,
        stop=None,
        prompt_ids=list(prompt),
        cached_tokens=1,
        tokens=tokens(text + ".", top),
        versions=[[0, 0, len(text) + 1]],
    )


def encode(request, *answers) -> Completion:
    return Completion.model_validate_json(DIALECT.encode(request, HEADER, answers))


def chunks_of(data: bytes) -> list[Completion]:
    """The chunks before [DONE], as the SDK reads them: its types know no null finish_reason, which OpenAI sends."""
    *chunks, done, rest = data.decode().split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [Completion.construct(**json.loads(chunk.removeprefix("data: "))) for chunk in chunks]


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
    ],
)
def test_prompts_of_every_kind_are_decoded(prompt, prompts):
    request = decode(prompt=prompt, n=2)
    assert request.prompts == prompts
    assert request.choices == 2 * len(prompts)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt[1]"),
        ({"prompt": [[1], []]}, "prompt[1]"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [1, [1]]}, "prompt"),
        ({"prompt": [-1]}, "prompt[0]"),
        ({"prompt": [True]}, "prompt[0]"),
        ({"temprature": 1}, "temprature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"n": 0}, "n"),
        ({"best_of": 2}, "best_of"),
        ({"n": 2, "best_of": 3}, "best_of"),
        ({"suffix": "end"}, "suffix"),
        ({"echo": True, "logprobs": 1}, "echo"),
        ({"echo": True, "prompt": [1]}, "echo"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"stop": [""]}, "stop"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"tools": []}, "tools"),
    ],
)
def test_bad_parameters_are_refused_by_name(fields, param):
    error = refusal(**fields)
    assert (error.status, error.param) == (400, param)


def test_parameters_are_in_sglangs_words_and_defaults_openais():
    request = decode()
    assert (request.max_tokens, request.n, request.sampling, request.logprobs) == (16, 1, {}, False)
    request = decode(
        max_tokens=3,
        n=2,
        best_of=2,
        temperature=0.5,
        top_k=4,
        min_p=0.1,
        frequency_penalty=1,
        logit_bias={"7": -1},
        stop="x",
        seed=5,
        logprobs=0,
        stream=True,
        user="me",
    )
    assert request.sampling == {
        "temperature": 0.5,
        "top_k": 4,
        "min_p": 0.1,
        "frequency_penalty": 1,
        "logit_bias": {"7": -1},
    }
    assert (request.max_tokens, request.n, request.stop, request.seed) == (3, 2, ["x"], 5)
    assert (request.logprobs, request.top_logprobs, request.stream) == (True, 0, True)


def test_choices_are_in_order_of_prompts_and_then_answers():
    request = decode(prompt=["p", "q"], n=2, echo=True)
    prompts = [[1, 2], [3]]
    answers = [answer(text, id=text * 32, prompt=prompts[i // 2]) for i, text in enumerate("abcd")]
    shared = [
        Answer(**{n: getattr(a, n) for n in Answer.__slots__} | {"prompt_ids": prompts[i // 2]})
        for i, a in enumerate(answers)
    ]
    response = encode(request, *shared)
    assert [(choice.index, choice.text) for choice in response.choices] == [(0, "pa"), (1, "pb"), (2, "qc"), (3, "qd")]
    assert [choice.to_dict()["interaction_id"] for choice in response.choices] == [t * 32 for t in "abcd"]
    assert (response.usage.prompt_tokens, response.usage.completion_tokens) == (3, 8)  # a prompt counts once
    assert response.id == "cmpl-" + "0" * 32


def test_logprobs_say_tokens_offsets_and_the_likeliest():
    top = [[(-0.25, ord("x")), (-0.5, ord("a"))], [(-0.25, ord("x"))], [(-0.5, ord("."))]]
    logprobs = encode(decode(logprobs=2), answer("ab", top=top)).choices[0].logprobs
    assert logprobs.tokens == ["a", "b", "."]
    assert logprobs.text_offset == [0, 1, 2]
    assert logprobs.token_logprobs == [-0.5] * 3
    assert logprobs.top_logprobs == [{"x": -0.25, "a": -0.5}, {"b": -0.5, "x": -0.25}, {".": -0.5}]
    plain = encode(decode(logprobs=0), answer("ab")).choices[0].logprobs
    assert (plain.tokens, plain.top_logprobs) == (["a", "b", "."], None)
    assert encode(decode(), answer("ab")).choices[0].logprobs is None


def test_exact_tokens_are_there_when_asked_for():
    choice = encode(decode(return_token_ids=True), answer("a")).choices[0]
    assert choice.model_extra == {
        "prompt_token_ids": [1, 2, 3],
        "token_ids": [97, 46],
        "token_logprobs": [-0.5, -0.5],
        "weight_versions": [[0, 0, 2]],
    }
    assert encode(decode(), answer("a")).choices[0].model_extra == {}


@pytest.mark.parametrize("cut", range(4))
def test_a_stream_says_the_same_as_the_whole(cut):
    request = decode(prompt=["p", "q"], logprobs=0, stream_options={"include_usage": True}, return_token_ids=True)
    answers = [answer("abc"), answer("xyz", finish_reason="length")]
    encoder = DIALECT.stream(request, HEADER)
    data = encoder.start()
    for index, text in enumerate(["abc.", "xyz."]):
        for part in (text[:cut], text[cut:]):
            deltas = [ContentDelta(part.rstrip("."))] if part.rstrip(".") else []
            data += encoder.push(index, AnswerDelta(deltas, tokens(part)))
    data += encoder.finish(1, answers[1]) + encoder.finish(0, answers[0])
    *chunks, last = chunks_of(data + encoder.end(answers))
    whole = encode(request, *answers)
    assert last.choices == []
    assert last.usage == whole.usage
    for choice in whole.choices:
        mine = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == choice.index]
        assert "".join(part.text for part in mine) == choice.text
        assert [part.finish_reason for part in mine] == [None] * (len(mine) - 1) + [choice.finish_reason]
        for name in ("tokens", "token_logprobs", "text_offset"):
            found = [entry for part in mine if part.logprobs for entry in getattr(part.logprobs, name)]
            assert found == getattr(choice.logprobs, name)
        assert mine[-1].model_extra == choice.model_extra


def test_a_stream_with_echo_begins_with_the_prompt_and_without_usage_ends_after_the_reason():
    encoder = DIALECT.stream(decode(prompt=["p", "q"], echo=True), HEADER)
    assert encoder.push(0, AnswerDelta([], tokens("a"))) == b""
    answers = [answer("a"), answer("b")]
    data = encoder.start() + encoder.finish(0, answers[0]) + encoder.finish(1, answers[1]) + encoder.end(answers)
    assert [(c.choices[0].text, c.choices[0].finish_reason) for c in chunks_of(data)] == [
        ("p", None),
        ("q", None),
        ("", "stop"),
        ("", "stop"),
    ]


def test_a_stream_that_breaks_off_ends_with_an_error():
    data = DIALECT.stream(decode(), HEADER).error(RequestError(502, "the engine died", code="engine_died"))
    assert json.loads(data.removeprefix(b"data: "))["error"]["code"] == "engine_died"
    assert json.loads(DIALECT.encode_error(refusal(n=0)))["error"]["param"] == "n"
