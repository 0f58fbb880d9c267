"""Completions through the official SDK: raw prompts as text or ids, several answers to each, streamed or whole."""

import openai
import pytest

from agentrl.testing import Reply


@pytest.fixture
def proxy(shared_proxy):
    return shared_proxy


def ask(proxy, session, prompt="abcd", **options):
    return proxy.sdk(session).completions.create(model="test", prompt=prompt, **options)


def test_a_text_is_encoded_as_it_stands_and_its_completion_recorded(proxy):
    session = proxy.session()
    ids = proxy.says("dcba")
    proxy.engine.enqueue(Reply(ids, logprobs=[-0.25] * len(ids)))
    response = ask(proxy, session, logprobs=0)
    (choice,) = response.choices
    assert (choice.text, choice.finish_reason) == ("dcba", "stop")
    assert choice.logprobs.token_logprobs == [-0.25] * len(ids)
    assert choice.logprobs.text_offset == list(range(len(ids)))
    (call,) = proxy.calls(session)
    assert (call["output_ids"], call["dialect"]) == (ids, "openai.completions")
    assert proxy.engine.requests[0]["input_ids"] == proxy.renderer.encode("abcd") == call["prompt_delta_ids"]
    assert proxy.engine.requests[0]["sampling_params"]["max_new_tokens"] == 16
    assert response.id == f"cmpl-{call['id']}"


def test_a_completion_that_looks_like_a_tool_call_is_text(proxy):
    proxy.engine.enqueue(proxy.says("calc(ab)"))
    assert ask(proxy, proxy.session()).choices[0].text == "calc(ab)"


def test_a_prompt_that_repeats_prompt_and_answer_extends_them(proxy):
    session = proxy.session()
    proxy.engine.enqueue(proxy.says("dc", end=False), proxy.says("ba"))
    first = ask(proxy, session)
    ask(proxy, session, "abcd" + first.choices[0].text + "x")
    one, two = proxy.calls(session)
    assert (two["parent_id"], two["fork_reason"]) == (one["id"], None)
    assert proxy.engine.requests[1]["input_ids"] == proxy.renderer.encode("abcddcx")


def test_a_prompt_that_differs_behind_an_answer_is_a_fork_and_a_repeated_prompt_is_not(proxy):
    """The text of an answer has no end-of-turn token, so a prompt that goes on behind it is another sequence."""
    session = proxy.session()
    proxy.engine.enqueue(proxy.says("dc"))
    text = ask(proxy, session).choices[0].text
    for prompt in ("abcd" + text + "x", "abcd", "abcdx", "x"):
        ask(proxy, session, prompt)
    reasons = [call["fork_reason"] for call in proxy.calls(session)]
    assert reasons == [None, "history_edited", None, "history_edited", "new_conversation"]


def test_a_prompt_of_token_ids_is_sampled_unchanged(proxy):
    session = proxy.session()
    proxy.engine.enqueue(proxy.says("dc", end=False), proxy.says("ba"))
    first = ask(proxy, session, [5, 6, 7], extra_body={"return_token_ids": True}).choices[0].model_extra
    assert first["prompt_token_ids"] == [5, 6, 7]
    ask(proxy, session, [*first["prompt_token_ids"], *first["token_ids"], 9])
    one, two = proxy.calls(session)
    assert (two["parent_id"], two["prompt_delta_ids"]) == (one["id"], [9])


@pytest.mark.parametrize("chosen", [0, 1])
def test_answers_with_equal_text_are_distinguished_by_their_token_ids(proxy, chosen):
    session = proxy.session()
    proxy.engine.enqueue(proxy.says("dc", end=False), proxy.says("dc"))
    said = ask(proxy, session, n=2, extra_body={"return_token_ids": True}).choices[chosen].model_extra
    ask(proxy, session, [*said["prompt_token_ids"], *said["token_ids"], 9])
    assert proxy.calls(session)[2]["parent_id"] == said["interaction_id"]


def test_token_ids_that_extend_a_conversation_keep_its_system_messages(proxy):
    session = proxy.session()
    proxy.engine.enqueue(proxy.says("dc"), proxy.says("ba"))
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "ab"}]
    said = proxy.sdk(session).chat.completions.create(
        model="test", messages=messages, extra_body={"return_token_ids": True}
    )
    ask(proxy, session, [*said.model_extra["prompt_token_ids"], *said.choices[0].model_extra["token_ids"], 9])
    one, two = proxy.calls(session)
    assert (two["parent_id"], two["system"]) == (one["id"], messages[:1])


@pytest.mark.parametrize("stream", [False, True])
def test_every_prompt_has_n_choices_in_order(proxy, stream):
    session = proxy.session()
    proxy.engine.respond = lambda ids, params: proxy.says(proxy.renderer.decode(ids)[::-1])
    answer = ask(proxy, session, ["ab", "cd"], n=2, echo=True, stream=stream)
    texts = [""] * 4
    for part in answer if stream else [answer]:
        for choice in part.choices:
            texts[choice.index] += choice.text
    assert texts == ["abba", "abba", "cddc", "cddc"]
    calls = proxy.calls(session)
    assert [call["status"] for call in calls] == ["complete"] * 4
    assert len({call["id"] for call in calls}) == 4


@pytest.mark.parametrize("chunks", [None, [1], [2, 1], [100]])
def test_a_stream_says_the_same_however_the_engine_splits_it(proxy, chunks):
    session = proxy.session()
    ids = proxy.says("abcdefgh")
    proxy.engine.enqueue(Reply(ids, chunks=chunks))
    stream = list(ask(proxy, session, stream=True, logprobs=1, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in stream if chunk.choices) == "abcdefgh"
    tokens = [t for c in stream if c.choices and c.choices[0].logprobs for t in c.choices[0].logprobs.tokens]
    assert tokens == [proxy.renderer.decode([token]) for token in ids]
    assert [chunk.choices[0].finish_reason for chunk in stream if chunk.choices][-1] == "stop"
    assert stream[-1].usage.completion_tokens == len(ids)


@pytest.mark.parametrize(
    ("options", "status", "param"),
    [
        ({"suffix": "x"}, 400, "suffix"),
        ({"best_of": 3}, 400, "best_of"),
        ({"prompt": [10**6]}, 400, "prompt"),
        ({"prompt": []}, 400, "prompt"),
    ],
)
def test_bad_input_is_refused_in_openais_shape(proxy, options, status, param):
    session = proxy.session()
    with pytest.raises(openai.APIStatusError) as caught:
        ask(proxy, session, **options)
    assert (caught.value.status_code, caught.value.param) == (status, param)
    assert proxy.calls(session) == []
