"""Calls that were refused, told to whoever asks why an agent got no answer; addresses that nothing is served at."""

import anthropic
import openai
import pytest
from databases import KINDS

from agentrl.store.events import REFUSALS_KEPT

HELLO = [{"role": "user", "content": "abcd"}]


def ask(proxy, session, **fields):
    fields = {"model": "default", "messages": HELLO, **fields}
    headers = {"Authorization": f"Bearer {session['api_key']}"}
    return proxy.post(f"/sessions/{session['session_id']}/v1/chat/completions", fields, headers=headers)


def refused(proxy, session):
    return proxy.get(f"/sessions/{session['session_id']}/refusals")


@pytest.mark.long_on("postgresql")
@pytest.mark.parametrize("database_kind", KINDS)
def test_refusals_of_a_session_are_kept(proxy):
    session, other = proxy.session(), proxy.session()
    assert ask(proxy, session, model="claude-x").status_code == 404
    assert ask(proxy, session, max_tokens=1 << 20).status_code == 400
    assert ask(proxy, session, temprature=1).status_code == 400
    assert ask(proxy, session).status_code == 200
    ask(proxy, other, n=0)
    found = refused(proxy, session)
    assert [(one["status"], one["code"], one["param"]) for one in found] == [
        (404, "model_not_found", "model"),
        (400, "context_length_exceeded", "messages"),
        (400, "unsupported_parameter", "temprature"),
    ]
    assert "no model 'claude-x'" in found[0]["message"]
    assert found[0]["route"] == f"/sessions/{session['session_id']}/v1/chat/completions"
    assert len(refused(proxy, other)) == 1
    events = proxy.get(f"/api/runs/{proxy.run_id}/events?kind=refused")
    assert {event["data"]["session_id"] for event in events} == {session["session_id"], other["session_id"]}


def test_a_client_that_goes_on_for_ever_does_not_fill_the_store(proxy):
    session = proxy.session()
    for _ in range(REFUSALS_KEPT + 5):
        assert ask(proxy, session, model="x").status_code == 404
    assert len(refused(proxy, session)) == REFUSALS_KEPT


def test_a_request_with_a_wrong_key_leaves_no_refusal(proxy):
    session, other = proxy.session(), proxy.session()
    path = f"/sessions/{session['session_id']}/v1/chat/completions"
    for key in ("wrong", other["api_key"]):
        answer = proxy.post(path, {"model": "x"}, headers={"Authorization": f"Bearer {key}"})
        assert answer.status_code in (401, 403)
    assert refused(proxy, session) == refused(proxy, other) == []
    answer = proxy.http.get(f"{proxy.url}/sessions/{session['session_id']}/refusals")
    assert answer.status_code == 401


@pytest.mark.parametrize("suffix", ["", "/v1"])
def test_anthropics_sdk_may_have_v1_on_its_base_url(proxy, suffix):
    session = proxy.session()
    root = session["base_url"].removesuffix("/v1")
    client = anthropic.Anthropic(base_url=root + suffix, api_key=session["api_key"], max_retries=0)
    proxy.engine.enqueue(proxy.says("Hello."))
    assert client.messages.create(model="default", max_tokens=9, messages=HELLO).content[0].text == "Hello."
    assert client.messages.count_tokens(model="default", messages=HELLO).input_tokens > 0
    assert "default" in [model.id for model in client.models.list()]
    assert client.models.retrieve("default").id == "default"
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        client.messages.create(model="default", max_tokens=0, messages=HELLO)


@pytest.mark.parametrize(
    ("suffix", "hint"),
    [("", ": base_url must end in /v1"), ("/v1/v1", ": base_url ends in one /v1, not in two")],
)
def test_a_wrong_base_url_raises_a_clear_error_in_openais_sdk(proxy, suffix, hint):
    session = proxy.session()
    root = session["base_url"].removesuffix("/v1")
    client = openai.OpenAI(base_url=root + suffix, api_key=session["api_key"], max_retries=0)
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="default", messages=HELLO)
    assert caught.value.response.json()["error"]["message"].endswith("/chat/completions" + hint)
    assert caught.value.code == "route_not_found"


def test_an_unknown_address_names_the_nearest(proxy):
    answer = proxy.post("/v1/chat/completion")
    assert answer.status_code == 404
    assert answer.json()["error"]["message"] == (
        "there is no route POST /v1/chat/completion; did you mean /v1/chat/completions?"
    )
    assert proxy.post("/xyz").json()["error"]["message"] == "there is no route POST /xyz"
