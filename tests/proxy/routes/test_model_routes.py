"""Chat Completions through the official SDK: models, refusals, several answers, and engines that stop."""

import threading

import openai
import pytest
from databases import KINDS
from sqlalchemy import text

from agentrl.testing import Reply

from .chat_calls import HELLO, ask


@pytest.fixture
def proxy(shared_proxy):
    return shared_proxy


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
