"""Chat Completions through the official SDK: exact tokens, bridged turns, commit before the end, visible failures."""

import json
import threading

import openai
import pytest
from databases import KINDS
from sqlalchemy import text

from agentrl.testing import Reply

HELLO = [{"role": "user", "content": "abcd"}]


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "calc",
            "parameters": {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]},
        },
    }
]


@pytest.fixture
def proxy(shared_proxy):
    return shared_proxy


def ask(proxy, session, messages=HELLO, **options):
    return proxy.sdk(session).chat.completions.create(model="test", messages=messages, **options)


def test_a_second_turn_extends_the_first_byte_for_byte(proxy):
    session = proxy.session()
    proxy.engine.enqueue(proxy.says("dcba"), proxy.says("no"))
    first = ask(proxy, session).choices[0].message.model_dump()
    ask(proxy, session, [*HELLO, first, {"role": "user", "content": "again"}])
    one, two = proxy.calls(session)
    assert two["parent_id"] == one["id"]
    assert two["fork_reason"] is None
    assert proxy.engine.requests[1]["input_ids"] == [
        *one["prompt_delta_ids"],
        *one["output_ids"],
        *two["prompt_delta_ids"],
    ]
    assert two["new_messages"] == [{"role": "user", "content": "again"}]


def test_a_call_that_adds_no_message_extends_the_answer(proxy):
    session = proxy.session()
    proxy.engine.enqueue(proxy.says("dcba"), proxy.says("no"))
    first = ask(proxy, session).choices[0].message.model_dump()
    ask(proxy, session, [*HELLO, first])  # the agent lets the policy speak again
    one, two = proxy.calls(session)
    assert (two["parent_id"], two["fork_reason"], two["new_messages"]) == (one["id"], None, [])
    whole = [*one["prompt_delta_ids"], *one["output_ids"], *two["prompt_delta_ids"]]
    assert proxy.engine.requests[1]["input_ids"] == whole


def test_an_edited_history_forks_with_its_reason(proxy):
    session = proxy.session()
    proxy.engine.enqueue(proxy.says("dcba"), proxy.says("no"))
    ask(proxy, session)
    ask(proxy, session, [*HELLO, {"role": "assistant", "content": "edited"}, {"role": "user", "content": "again"}])
    assert [call["fork_reason"] for call in proxy.calls(session)] == [None, "history_edited"]


def test_a_truncated_answer_whose_text_is_other_tokens_forks_with_its_reason(proxy):
    session = proxy.session()
    cut = proxy.says("dé", end=False)[:-1]  # in the middle of a character
    proxy.engine.enqueue(Reply(cut, finish_reason="length"), proxy.says("no"))
    first = ask(proxy, session)
    assert first.choices[0].finish_reason == "length"
    ask(proxy, session, [*HELLO, first.choices[0].message.model_dump(), {"role": "user", "content": "again"}])
    assert [call["fork_reason"] for call in proxy.calls(session)] == [None, "truncated"]


def test_tool_calls_arrive_as_tool_calls_and_bridge(proxy):
    session = proxy.session()
    proxy.engine.enqueue(proxy.says("calc(ab)"), proxy.says("done"))
    answer = ask(proxy, session, tools=TOOLS)
    (tool,) = answer.choices[0].message.tool_calls
    assert (tool.function.name, json.loads(tool.function.arguments)) == ("calc", {"x": "ab"})
    assert answer.choices[0].finish_reason == "tool_calls"
    result = {"role": "tool", "tool_call_id": tool.id, "content": "ba"}
    ask(proxy, session, [*HELLO, answer.choices[0].message.model_dump(exclude_none=True), result], tools=TOOLS)
    assert [call["bridged"] for call in proxy.calls(session)] == [False, True]


@pytest.mark.parametrize("database_kind", KINDS)
def test_an_engine_error_with_a_nul_character_fails_the_call(proxy):
    session = proxy.session()
    proxy.engine.enqueue(Reply(status=500, error="\0"))
    with pytest.raises(openai.InternalServerError):
        ask(proxy, session)
    assert [call["status"] for call in proxy.calls(session)] == ["failed"]


def test_a_retry_count_that_is_too_large_is_ignored(proxy):
    session = proxy.session()
    ask(proxy, session, extra_headers={"x-stainless-retry-count": "9" * 20})
    assert "retry" not in proxy.calls(session)[0]["options"]


def test_tool_arguments_with_an_unpaired_surrogate_are_recorded_unchanged(proxy):
    session = proxy.session()
    function = {"name": "calc", "arguments": '{"x": "\\ud800"}'}
    said = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": function}]}
    ask(proxy, session, [*HELLO, said, {"role": "tool", "tool_call_id": "1", "content": "?"}], tools=TOOLS)
    assert proxy.calls(session)[0]["new_messages"][1]["tool_calls"][0]["function"] == function


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


@pytest.mark.parametrize(
    ("options", "status", "code"),
    [
        ({"max_tokens": 100_000}, 400, "context_length_exceeded"),
    ],
)
def test_bad_requests_have_the_right_status_and_reach_no_engine(proxy, options, status, code):
    session = proxy.session()
    with pytest.raises(openai.APIStatusError) as caught:
        proxy.sdk(session).chat.completions.create(**{"model": "test", "messages": HELLO, **options})
    assert (caught.value.status_code, caught.value.code) == (status, code)
    assert proxy.engine.requests == []


def test_malformed_json_is_refused(proxy):
    session = proxy.session()
    answer = proxy.http.post(
        f"{session['base_url']}/chat/completions", content=b"{", headers={"x-api-key": session["api_key"]}
    )
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "invalid_json"


def test_the_run_and_default_are_the_listed_models(proxy):
    assert [m.id for m in proxy.sdk(proxy.session()).models.list()] == ["test", "default"]


def test_n_answers_are_siblings_in_the_tree_and_each_can_be_continued(proxy):
    session = proxy.session()
    proxy.engine.enqueue(proxy.says("aa"), proxy.says("bb"), proxy.says("cc"), proxy.says("dd"))
    answer = ask(proxy, session, n=3, seed=7)
    assert sorted(choice.message.content for choice in answer.choices) == ["aa", "bb", "cc"]
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert answer.usage.completion_tokens == 9
    assert answer.usage.prompt_tokens == len(proxy.engine.requests[0]["input_ids"])
    assert sorted(r["sampling_params"]["sampling_seed"] for r in proxy.engine.requests) == [7, 8, 9]
    calls = {call["id"]: call for call in proxy.calls(session)}
    assert [calls[choice.interaction_id]["options"]["choice"] for choice in answer.choices] == [0, 1, 2]
    assert {call["parent_id"] for call in calls.values()} == {None}
    assert {call["fork_reason"] for call in calls.values()} == {None}
    chosen = answer.choices[1]
    ask(proxy, session, [*HELLO, chosen.message.model_dump(), {"role": "user", "content": "x"}])
    assert proxy.calls(session)[-1]["parent_id"] == chosen.interaction_id


def test_n_streamed_answers_come_interleaved_and_end_once(proxy):
    session = proxy.session()
    proxy.engine.enqueue(*(Reply(proxy.says(text), chunks=[1] * 4) for text in ("aa", "bb")))
    texts, ends = ["", ""], []
    for event in ask(proxy, session, n=2, stream=True, stream_options={"include_usage": True}):
        for choice in event.choices:
            texts[choice.index] += choice.delta.content or ""
            ends += [choice.index] if choice.finish_reason else []
        usage = event.usage
    assert sorted(texts) == ["aa", "bb"]
    assert sorted(ends) == [0, 1]
    assert usage.completion_tokens == 6


def test_one_of_n_that_fails_fails_the_request_and_leaves_nothing_running(proxy, until):
    session = proxy.session()
    proxy.engine.enqueue(proxy.says("aa"), Reply(proxy.says("bb"), omit=frozenset({"output_ids"})))
    with pytest.raises(openai.InternalServerError):
        ask(proxy, session, n=2)
    until(lambda: not [call for call in proxy.calls(session) if call["status"] == "running"])
    assert "failed" in {call["status"] for call in proxy.calls(session)}


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


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "calc"}}])
@pytest.mark.parametrize("stream", [False, True])
def test_a_forced_call_is_held_to_a_grammar_and_not_trained(proxy, choice, stream):
    session = proxy.session()
    proxy.engine.enqueue(proxy.says("calc(ab)"), proxy.says("done"))
    answer = ask(proxy, session, tools=TOOLS, tool_choice=choice, stream=stream)
    if stream:
        parts = [p for event in answer for c in event.choices for p in c.delta.tool_calls or []]
        call_id, name = parts[0].id, parts[0].function.name
        arguments = "".join(part.function.arguments for part in parts)
    else:
        (call,) = answer.choices[0].message.tool_calls
        call_id, name, arguments = call.id, call.function.name, call.function.arguments
        assert answer.choices[0].message.content is None
    assert (name, json.loads(arguments)) == ("calc", {"x": "ab"})
    (recorded,) = proxy.calls(session)
    told = proxy.engine.requests[0]["sampling_params"]
    assert json.loads(told["structural_tag"])["format"]["elements"][0] == {"type": "const_string", "value": "calc("}
    assert recorded["prompt_delta_ids"] == proxy.engine.requests[0]["input_ids"]
    assert not recorded["trainable"]  # the distribution was modified
    assert proxy.renderer.decode(recorded["output_ids"]).startswith("calc(ab)")
    reply = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}],
    }
    ask(proxy, session, [*HELLO, reply, {"role": "tool", "tool_call_id": call_id, "content": "ba"}], tools=TOOLS)
    assert proxy.calls(session)[-1]["bridged"]


def test_template_options_reach_the_format_and_are_part_of_the_conversation(proxy):
    session = proxy.session()
    proxy.engine.enqueue(*[proxy.says("ab")] * 3)
    off = {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}
    with pytest.raises(openai.BadRequestError, match="the chat format 'chatml' has no option 'enable_thinking'"):
        ask(proxy, session, extra_body={"chat_template_kwargs": {"enable_thinking": True}})
    with pytest.raises(openai.BadRequestError, match="tools: cannot be set"):
        ask(proxy, session, extra_body={"chat_template_kwargs": {"tools": "x"}})
    ask(proxy, session, **off)
    more = [*HELLO, {"role": "assistant", "content": "ab"}, {"role": "user", "content": "c"}]
    ask(proxy, session, more, **off)
    ask(proxy, session, more)
    assert [call["bridged"] for call in proxy.calls(session)] == [False, True, True]


def test_with_tool_choice_none_a_call_is_text_and_the_prompt_is_the_same(proxy):
    session = proxy.session()
    proxy.engine.enqueue(proxy.says("calc(ab)"), proxy.says("calc(ab)"))
    answer = ask(proxy, session, tools=TOOLS, tool_choice="none")
    assert (answer.choices[0].message.content, answer.choices[0].message.tool_calls) == ("calc(ab)", None)
    ask(proxy, session, tools=TOOLS)
    first, second = proxy.engine.requests
    assert first["input_ids"] == second["input_ids"]


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


def test_the_turn_type_header_sets_the_role_of_a_call(proxy):
    session = proxy.session()
    for said, role in (("side", "side"), ("subagent", "subagent"), (None, "main")):
        headers = {"x-turn-type": said} if said else {}
        ask(proxy, session, [{"role": "user", "content": role}], extra_headers=headers)
    assert [call["role"] for call in proxy.calls(session)] == ["side", "subagent", "main"]
    with pytest.raises(openai.APIStatusError, match="did you mean 'side'"):
        ask(proxy, session, extra_headers={"x-turn-type": "sid"})


def test_the_policy_is_listed_and_found(proxy):
    client = proxy.sdk(proxy.session())
    listed, default = client.models.list().data
    assert (listed.id, client.models.retrieve("test").id) == ("test", "test")
    assert (default.id, client.models.retrieve("default").id) == ("default", "default")
    with pytest.raises(openai.NotFoundError, match="did you mean 'test'"):
        client.models.retrieve("tset")


class TestWithOwnStore:
    """Rows of all sessions, and engines that stop."""

    @pytest.fixture
    def proxy(self, own_proxy):
        return own_proxy

    def test_a_call_waits_for_an_engine_that_comes_back(self, proxy):
        session = proxy.session()
        proxy.engine.stop()
        answers = []
        worker = threading.Thread(target=lambda: answers.append(ask(proxy, session)))
        worker.start()
        proxy.engine.enqueue(proxy.says("back"))
        proxy.engine.start()
        worker.join(120)
        assert answers[0].choices[0].message.content == "back"

    def test_the_system_messages_are_stored_once(self, proxy):
        session = proxy.session()
        system = {"role": "developer", "content": [{"type": "text", "text": "be brief"}]}
        first = ask(proxy, session, [system, *HELLO]).choices[0].message.model_dump()
        ask(proxy, session, [system, *HELLO, first, {"role": "user", "content": "x"}])
        ask(proxy, proxy.session(), [{"role": "system", "content": "be brief"}, *HELLO])
        for call in proxy.calls(session):
            assert call["system"] == [{"role": "system", "content": "be brief"}]
        assert proxy.calls(session)[0]["new_messages"] == HELLO
        with proxy.database.read() as conn:
            assert conn.execute(text("SELECT count(*) FROM contents")).scalar_one() == 1

    @pytest.mark.parametrize("stream", [False, True])
    def test_an_answer_that_breaks_off_continues_where_it_stopped(self, proxy, stream):
        session, ids = proxy.session(), proxy.says("abcd")
        proxy.engine.enqueue(Reply(ids, drop_after=2), ids[2:])
        answer = ask(proxy, session, stream=stream, max_tokens=20)
        texts = (
            [part.choices[0].delta.content or "" for part in answer] if stream else [answer.choices[0].message.content]
        )
        assert "".join(texts) == "abcd"
        (call,) = proxy.calls(session)
        assert (call["output_ids"], call["version_spans"]) == (ids, [[0, 0, len(ids)]])
        first, second = proxy.engine.requests
        assert second["input_ids"] == first["input_ids"] + ids[:2]
        assert second["sampling_params"]["max_new_tokens"] == 18

    def test_only_hashes_of_keys_are_stored(self, proxy):
        session = proxy.session()
        with proxy.database.read() as conn:
            stored = conn.execute(text("SELECT group_concat(key_hash) FROM sessions")).scalar_one()
        assert session["api_key"] not in stored
