"""Failures in every dialect: statuses, codes, the parameter at fault, keys, retries."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agentrl.errors import RequestError
from agentrl.testing import Reply

from .clients import clients

TOOLS = {
    "integer": b'[{"a": %d}]' % 10**30,
    "depth": b"[%s1%s]" % (b'{"a":' * 500, b"}" * 500),
    "encoding": b'[{"a": "\xff"}]',
}
REFUSED: dict[str, tuple[dict[str, Any], int, str]] = {
    "unknown-model": ({"model": "gpt-9"}, 404, "model_not_found"),
    "unknown-parameter": ({"temprature": 1}, 400, "unsupported_parameter"),
}
KEY = {"Idempotency-Key": "k"}
streamed_or_whole = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])


@clients()
@pytest.mark.parametrize("body", [b"{", b"[]"], ids=["syntax", "kind"])
def test_a_body_that_is_no_json_object_is_refused_as_invalid_json(client, body):
    with pytest.raises(RequestError) as caught:
        client.dialect.decode(body)
    assert (caught.value.status, caught.value.code) == (400, "invalid_json")


@clients()
def test_a_prompt_that_is_not_utf8_is_refused_as_invalid_json(client):
    body = json.dumps({"model": "m", **client.body}).encode().replace(b"abcd", b"\xff")
    with pytest.raises(RequestError) as caught:
        client.dialect.decode(body)
    assert (caught.value.status, caught.value.code) == (400, "invalid_json")


@clients(with_field="tool")
@pytest.mark.parametrize("tools", TOOLS.values(), ids=TOOLS)
def test_tools_that_json_cannot_repeat_are_refused_as_invalid_json(client, tools):
    body = json.dumps({"model": "m", **client.body}).encode()
    with pytest.raises(RequestError) as caught:
        client.dialect.decode(body[:-1] + b', "tools": ' + tools + b"}")
    assert (caught.value.status, caught.value.code) == (400, "invalid_json")


@clients()
def test_an_unknown_parameter_is_ignored_when_null_and_refused_by_name_otherwise(client):
    assert client.decode(moderation=None) == client.decode()
    error = client.refusal(moderation=None, moderated=False)
    assert (error.status, error.param) == (400, "moderated")


@clients()
@pytest.mark.parametrize(("name", "value"), [("temperature", -1), ("temperature", 9), ("top_p", -0.5), ("top_p", 2)])
def test_a_sampling_parameter_out_of_bounds_is_refused_by_name(client, name, value):
    error = client.refusal(**{name: value})
    assert (error.status, error.param) == (400, name)


@clients()
def test_a_token_limit_below_one_is_refused_by_name(client):
    error = client.refusal(**{client.limit: 0})
    assert (error.status, error.param) == (400, client.limit)


@clients()
@streamed_or_whole
@pytest.mark.parametrize("case", [*REFUSED, "context-length"])
def test_a_refused_request_has_its_status_and_code_and_reaches_no_engine(proxy, client, stream, case):
    session = proxy.session()
    long = json.loads(json.dumps(client.body).replace("abcd", "a" * 5000))
    fields, status, code = REFUSED.get(case, (long, 400, "context_length_exceeded"))
    with pytest.raises(client.failure) as caught:
        client.answer(session, stream=stream, **fields)
    assert (caught.value.status_code, client.code(caught.value)) == (client.status(status, code), code)
    assert proxy.engine.requests == proxy.calls(session) == []


@clients()
def test_an_engine_that_dies_in_a_stream_raises_the_error_of_the_sdk(own_proxy, client):
    session = own_proxy.session()
    own_proxy.engine.enqueue(*[Reply(own_proxy.says("abcd"), chunks=[1] * 9, drop_after=2)] * 5)
    seen: list[Any] = []
    with pytest.raises(client.failure) as caught:
        seen.extend(client.ask(session, stream=True))
    assert "".join(map(client.text_of, seen)).startswith("ab")
    assert client.code(caught.value) == "engine_died"
    assert [call["status"] for call in own_proxy.calls(session)] == ["failed"]


@clients()
@pytest.mark.parametrize("missing", ["output_token_logprobs", "weight_versions", "output_ids"])
def test_an_engine_answer_that_cannot_be_recorded_is_a_502_and_a_failed_call(proxy, client, missing):
    session = proxy.session()
    proxy.engine.enqueue(Reply(proxy.says("abcd"), omit=frozenset({missing})))
    with pytest.raises(client.failure) as caught:
        client.answer(session)
    assert caught.value.status_code == 502
    (call,) = proxy.calls(session)
    assert call["status"] == "failed"
    assert "output_ids" not in call


@clients()
def test_a_key_opens_its_own_session_by_both_routes(proxy, client):
    mine, other = proxy.session(), proxy.session()
    path = f"/sessions/{mine['session_id']}{client.path}"
    run = {"Authorization": "Bearer run-key"}

    def status(headers, at=path):
        return proxy.post(at, {"model": "test", **client.body}, headers=headers).status_code

    assert status({}) == 401
    assert status({"Authorization": "Bearer wrong"}) == 401
    assert status({"Authorization": f"Bearer {other['api_key']}"}) == client.status(403, "forbidden")
    assert status({"x-api-key": mine["api_key"]}) == 200
    assert status({"Authorization": f"Bearer {mine['api_key']}"}, client.path) == 200
    assert status(run, client.path) == client.status(403, "forbidden")
    assert status(run | {"X-Session-ID": mine["session_id"]}, client.path) == 200
    assert [len(proxy.calls(session)) for session in (mine, other)] == [3, 0]


@clients()
def test_a_sealed_session_refuses_calls(proxy, client):
    session = proxy.session()
    proxy.post(f"/sessions/{session['session_id']}/end")
    with pytest.raises(client.failure) as caught:
        client.answer(session)
    status = client.status(409, "session_sealed")
    assert (caught.value.status_code, client.code(caught.value)) == (status, "session_sealed")


def answers(proxy, client, headers, **fields):
    """The answers to requests of one session that differ in their headers."""
    session = proxy.session()
    body, key = {"model": "test", **client.body, **fields}, {"x-api-key": session["api_key"]}
    path = f"/sessions/{session['session_id']}{client.path}"
    found = [proxy.post(path, body, headers=key | more) for more in headers]
    assert [answer.status_code for answer in found] == [200] * len(found), found[-1].text
    assert len(proxy.engine.requests) == len(proxy.calls(session)) == 1
    return [answer.content for answer in found]


@clients()
@streamed_or_whole
@pytest.mark.parametrize("header", ["idempotency-key", "x-stainless-retry-count"])
def test_a_retry_gets_the_same_answer_and_samples_nothing(proxy, client, stream, header):
    proxy.engine.enqueue(*[proxy.says(text) for text in ("hello", "other")])
    first = {header: "1"} if header == "idempotency-key" else {}
    one, two = answers(proxy, client, [first, {header: "1"}], stream=stream)
    assert b"other" not in two
    assert stream or one == two


@clients(with_field="stop")
def test_a_retry_of_an_answer_that_a_stop_string_cut_gets_the_same_answer(proxy, client):
    proxy.engine.enqueue(Reply(proxy.says("ab.cd", end=False), finish_reason="stop"))
    one, two = answers(proxy, client, [KEY, KEY], **{client.stop: ["."]})
    assert one == two


@clients(with_field="tool")
def test_a_retry_of_a_tool_call_gets_the_same_call(proxy, client):
    proxy.engine.enqueue(proxy.says("calc(ab)"))
    one, two = answers(proxy, client, [KEY, KEY], tools=[client.tool])
    assert one == two
    assert b"calc" in one


@clients()
def test_another_request_with_a_used_idempotency_key_is_refused(proxy, client):
    session = proxy.session(sampling={"temperature": 1.0})
    path, told = f"/sessions/{session['session_id']}{client.path}", KEY | {"x-api-key": session["api_key"]}
    body = {"model": "test", **client.body}
    assert proxy.post(path, body, headers=told).status_code == 200
    refused = proxy.post(path, body | {"temperature": 0.5}, headers=told)
    assert refused.status_code == 400
    assert "Idempotency-Key" in refused.text
