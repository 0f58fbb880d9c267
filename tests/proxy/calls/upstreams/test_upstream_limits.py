"""Calls to other models count against the limits of their session."""

from contextlib import suppress

import openai
import pytest

from agentrl.store.audit import run_audit

from .judge_server import STREAM, ask, event, stream, whole


@pytest.mark.parametrize("run_limits", [{"max_concurrent_calls_per_session": 1, "max_calls_per_session": 3}])
def test_upstream_calls_count_against_the_limits_of_their_session(proxy, judge, until):
    session, other = proxy.session(), proxy.session()
    judge.answer = stream(*STREAM, wait_before=1)
    events = iter(ask(proxy, session, stream=True))
    next(events)
    for model in ("default", "judge"):
        with pytest.raises(openai.RateLimitError, match="1 calls under way, of 1"):
            ask(proxy, session, model)
    ask(proxy, other, "default")
    judge.gate.set()
    assert len(list(events)) == 2

    def answered():  # the place is free once the proxy has sent the end
        with suppress(openai.RateLimitError):
            return ask(proxy, session, "default")

    until(answered)
    judge.answer = whole({"error": {"message": "no"}}, 400)
    with pytest.raises(openai.BadRequestError):
        ask(proxy, session)
    for model in ("judge", "default"):
        with pytest.raises(openai.PermissionDeniedError, match="3 of its 3 calls"):
            ask(proxy, session, model)
    assert len(judge.got) == 2


@pytest.mark.parametrize("run_limits", [{"max_body_bytes": 20_000}])
@pytest.mark.parametrize("streamed", [False, True])
def test_an_upstream_answer_over_the_body_limit_is_cut_off(proxy, judge, streamed):
    session = proxy.session()
    if streamed:
        judge.answer = stream(STREAM[0], b"data: " + b"x" * 30_000)
    else:
        judge.answer = whole({"choices": [{"finish_reason": "stop", "message": {"content": "x" * 30_000}}]})
    with pytest.raises(openai.APIError, match="answered more than 20000 bytes"):
        list(ask(proxy, session, stream=streamed))
    (call,) = proxy.calls(session)
    assert call["status"] == "failed"


@pytest.mark.parametrize("run_limits", [{"max_tokens_per_session": 50}])
@pytest.mark.parametrize("streamed", [False, True])
def test_tokens_reported_by_an_upstream_count_for_the_root_session(proxy, judge, streamed):
    root = proxy.session()
    sub = proxy.post("/sessions", {"parent_session_id": root["session_id"]}).json()
    usage = {"usage": {"prompt_tokens": 1000, "completion_tokens": 40}}
    answered = {"id": "j", "choices": [{"finish_reason": "stop", "message": {"content": "good"}}]}
    events = (STREAM[0], event({"id": "j", "choices": [], **usage}), *STREAM[1:])
    judge.answer = stream(*events) if streamed else whole(answered | usage)
    for session in (root, sub):
        answer = ask(proxy, session, stream=streamed)
        if streamed:
            list(answer)
    for session in (root, sub):
        with pytest.raises(openai.PermissionDeniedError, match="80 of its 50 tokens"):
            ask(proxy, session, "default")
    with proxy.database.read() as conn:
        assert list(run_audit.scan(conn, proxy.run_id)) == []


@pytest.mark.parametrize("run_limits", [{"max_calls_per_session": 1}])
def test_an_upstream_call_that_never_began_does_not_count(proxy):
    session = proxy.session()
    for _ in range(2):
        bad = proxy.http.post(
            session["base_url"] + "/chat/completions",
            content=b'{"model": "judge", "x": 1e999}',
            headers={"Authorization": f"Bearer {session['api_key']}"},
        )
        assert (bad.status_code, bad.json()["error"]["code"]) == (400, "invalid_json")
    assert ask(proxy, session).choices[0].message.content == "good"
