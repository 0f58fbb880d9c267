"""Completions through the official SDK: raw prompts as text or ids, several answers to each, streamed or whole."""

import openai
import pytest

from agentrl.testing import Reply


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


def test_what_looks_like_a_tool_call_is_text(proxy):
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


def test_a_prompt_that_goes_on_otherwise_is_a_fork_and_the_same_prompt_is_none(proxy):
    """The text of an answer has no end-of-turn token, so a prompt that goes on behind it is another sequence."""
    session = proxy.session()
    proxy.engine.enqueue(proxy.says("dc"))
    text = ask(proxy, session).choices[0].text
    for prompt in ("abcd" + text + "x", "abcd", "abcdx", "x"):
        ask(proxy, session, prompt)
    reasons = [call["fork_reason"] for call in proxy.calls(session)]
    assert reasons == [None, "history_edited", None, "history_edited", "new_conversation"]


def test_ids_are_taken_as_they_are(proxy):
    session = proxy.session()
    proxy.engine.enqueue(proxy.says("dc", end=False), proxy.says("ba"))
    first = ask(proxy, session, [5, 6, 7], extra_body={"return_token_ids": True}).choices[0].model_extra
    assert first["prompt_token_ids"] == [5, 6, 7]
    ask(proxy, session, [*first["prompt_token_ids"], *first["token_ids"], 9])
    one, two = proxy.calls(session)
    assert (two["parent_id"], two["prompt_delta_ids"]) == (one["id"], [9])


@pytest.mark.parametrize("chosen", [0, 1])
def test_answers_that_read_the_same_are_told_apart_by_their_ids(proxy, chosen):
    session = proxy.session()
    proxy.engine.enqueue(proxy.says("dc", end=False), proxy.says("dc"))
    said = ask(proxy, session, n=2, extra_body={"return_token_ids": True}).choices[chosen].model_extra
    ask(proxy, session, [*said["prompt_token_ids"], *said["token_ids"], 9])
    assert proxy.calls(session)[2]["parent_id"] == said["interaction_id"]


def test_ids_that_go_on_from_a_conversation_keep_its_system_messages(proxy):
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


def test_text_is_streamed_before_the_answer_is_complete_and_ends_after_the_commit(proxy):
    session = proxy.session()
    proxy.engine.enqueue(Reply(proxy.says("abcd"), hold_after=2))
    stream = iter(ask(proxy, session, stream=True))
    seen = ""
    while len(seen) < 2:
        seen += next(stream).choices[0].text
    assert [call["status"] for call in proxy.calls(session)] == ["running"]
    proxy.engine.release()
    reasons = [chunk.choices[0].finish_reason for chunk in stream]
    assert reasons[-1] == "stop"
    assert [call["status"] for call in proxy.calls(session)] == ["complete"]


def test_a_stop_string_cuts_the_text_and_not_the_tokens(proxy):
    session = proxy.session()
    ids = proxy.says("ab.cd", end=False)
    proxy.engine.enqueue(Reply(ids, finish_reason="stop"))
    assert ask(proxy, session, stop=".").choices[0].text == "ab"
    assert proxy.calls(session)[0]["output_ids"] == ids


def test_an_engine_that_dies_in_a_stream_raises_in_the_client(proxy):
    session = proxy.session()
    proxy.engine.enqueue(*[Reply(proxy.says("abcd"), chunks=[1] * 9, drop_after=2)] * 5)
    with pytest.raises(openai.APIError) as caught:
        list(ask(proxy, session, stream=True))
    assert caught.value.code == "engine_died"
    assert [call["status"] for call in proxy.calls(session)] == ["failed"]


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
