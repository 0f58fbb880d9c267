"""Sampling through Chat Completions: parameters, stops, aborts, versions and logprobs."""

import threading

import openai
import pytest

from agentrl.testing import Reply

from .chat_calls import ask


@pytest.fixture
def proxy(shared_proxy):
    return shared_proxy


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_split_by_an_abort_ends_the_answer(proxy, until, stream):
    """No engine sees the whole of it: what is sampled behind it is no part of the answer."""
    session = proxy.session()
    ids, cut = proxy.says("ab STOP cd"), len(proxy.says("ab ST", end=False))
    proxy.engine.enqueue(Reply(ids, chunks=[cut], hold_after=cut), Reply(ids[cut:], versions=[1] * (len(ids) - cut)))

    def abort():
        until(lambda: proxy.engine.holding)
        proxy.http.post(f"{proxy.engine.url}/abort_request", json={"abort_all": True})

    worker = threading.Thread(target=abort)
    worker.start()
    answer = ask(proxy, session, stop=["STOP"], stream=stream)
    texts = [part.choices[0].delta.content or "" for part in answer] if stream else [answer.choices[0].message.content]
    worker.join(120)
    (call,) = proxy.calls(session)
    kept = proxy.says("ab STOP", end=False)
    assert ("".join(texts), call["output_ids"], call["finish_reason"]) == ("ab ", kept, "stop")
    assert (len(call["logprobs"]), call["version_spans"]) == (len(kept), [[0, 0, cut], [1, cut, len(kept)]])


def test_a_stop_string_completed_by_the_last_allowed_token_is_a_stop(proxy):
    """SGLang says `length`, but nothing of the answer is missing."""
    ids = proxy.says("ab.", end=False)
    proxy.engine.enqueue(Reply(ids, finish_reason="length"))
    answer = ask(proxy, proxy.session(), stop=".", max_tokens=len(ids)).choices[0]
    assert (answer.message.content, answer.finish_reason) == ("ab", "stop")


def test_training_sessions_explore_even_when_the_agent_asks_for_greedy(proxy):
    session = proxy.session()
    ask(proxy, session, temperature=0)
    assert proxy.engine.requests[0]["sampling_params"]["temperature"] == 1.0
    (call,) = proxy.calls(session)
    assert call["options"]["replaced"] == {"temperature": 0.0}


def test_evaluation_has_its_own_sampling(proxy):
    ask(proxy, proxy.session(sampling={"temperature": 0.0}))
    assert proxy.engine.requests[0]["sampling_params"]["temperature"] == 0.0


def test_a_weight_version_that_changes_within_an_answer_is_recorded_per_token(proxy):
    session = proxy.session()
    ids = proxy.says("abcd")
    proxy.engine.enqueue(Reply(ids, versions=[3, 3, 4, 4, 4]))
    ask(proxy, session)
    assert proxy.calls(session)[0]["version_spans"] == [[3, 0, 2], [4, 2, 5]]


def test_an_aborted_answer_is_continued_where_it_stopped(proxy, until):
    session = proxy.session()
    ids = proxy.says("abcd")
    proxy.engine.enqueue(Reply(ids, hold_after=2), Reply(ids[2:], versions=[1] * 3))
    answers = []
    worker = threading.Thread(target=lambda: answers.append(ask(proxy, session, max_tokens=20)))
    worker.start()
    until(lambda: proxy.engine.running)
    proxy.http.post(f"{proxy.engine.url}/abort_request", json={"abort_all": True})
    worker.join(120)
    (call,) = proxy.calls(session)
    assert call["status"] == "complete"
    if len(proxy.engine.requests) == 2:  # the abort came after some tokens, or before any
        sent = len(proxy.engine.requests[1]["input_ids"]) - len(proxy.engine.requests[0]["input_ids"])
        assert proxy.engine.requests[1]["sampling_params"]["max_new_tokens"] == 20 - sent


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_name_every_token_and_its_likeliest(proxy, stream):
    session = proxy.session()
    ids = proxy.says("dcba")
    proxy.engine.enqueue(Reply(ids, chunks=[1, 2]))
    answer = ask(proxy, session, logprobs=True, top_logprobs=2, stream=stream)
    choices = [choice for event in answer for choice in event.choices] if stream else answer.choices
    found = [token for choice in choices if choice.logprobs for token in choice.logprobs.content]
    assert [token.token for token in found] == [proxy.renderer.decode([i]) for i in ids]
    assert [token.logprob for token in found] == [-(i + 1) / 8 for i in range(len(ids))]
    assert [[other.logprob for other in token.top_logprobs] for token in found] == [
        [token.logprob, token.logprob - 1] for token in found
    ]
    assert proxy.engine.requests[0]["top_logprobs_num"] == 2


def test_logprobs_are_built_only_when_asked_for(proxy):
    session = proxy.session()
    assert ask(proxy, session).choices[0].logprobs is None
    assert "top_logprobs_num" not in proxy.engine.requests[0]


def test_token_ids_are_added_when_asked_for(proxy):
    session = proxy.session()
    ids = proxy.says("ab")
    proxy.engine.enqueue(ids, ids)
    whole = ask(proxy, session, extra_body={"return_token_ids": True})
    *_, last = ask(proxy, session, extra_body={"return_token_ids": True}, stream=True)
    for choice, body in ((whole.choices[0], whole), (last.choices[0], last)):
        assert choice.token_ids == ids
        assert choice.weight_versions == [[0, 0, len(ids)]]
        assert body.prompt_token_ids == proxy.engine.requests[0]["input_ids"]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"response_format": {"type": "json_object"}}, {"json_schema": '{"type":"object"}'}),
        ({"logit_bias": {"5": 2}}, {"logit_bias": {"5": 2.0}}),
        ({"frequency_penalty": 0.5}, {"frequency_penalty": 0.5}),
    ],
)
def test_parameters_that_change_the_distribution_reach_the_engine_and_are_not_trained(proxy, options, told):
    session = proxy.session()
    ask(proxy, session, **options)
    assert told.items() <= proxy.engine.requests[0]["sampling_params"].items()
    assert not proxy.calls(session)[0]["trainable"]


def test_a_biased_token_outside_the_vocabulary_is_refused(proxy):
    with pytest.raises(openai.BadRequestError, match="outside the vocabulary"):
        ask(proxy, proxy.session(), logit_bias={"99999999": 1})
    assert proxy.engine.requests == []


@pytest.mark.parametrize("options", [{"response_format": {"type": "json_object"}}, {"seed": 3}])
def test_an_answer_that_cannot_be_continued_starts_anew_if_nothing_was_sent(proxy, until, options):
    session = proxy.session()
    ids = proxy.says("abcdef")
    proxy.engine.enqueue(Reply(ids, chunks=[2], hold_after=2), ids)
    done = []
    asking = threading.Thread(target=lambda: done.append(ask(proxy, session, **options)))
    asking.start()
    until(lambda: proxy.engine.holding)
    proxy.http.post(proxy.engine.url + "/abort_request", json={"abort_all": True})
    asking.join(120)
    assert done[0].choices[0].message.content == "abcdef"
    first, second = proxy.engine.requests
    assert second["input_ids"] == first["input_ids"]
