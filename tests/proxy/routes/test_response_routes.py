"""Responses that are asked for once more, through the official SDK: as they were answered, until they are deleted."""

import httpx
import openai
import pytest

CALC = {
    "type": "function",
    "name": "calc",
    "parameters": {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]},
    "strict": False,
}
OPTIONS = {"instructions": "no", "metadata": {"a": "b"}, "max_output_tokens": 50, "user": "me", "temperature": 1.0}


@pytest.fixture
def proxy(shared_proxy):
    return shared_proxy


def ask(proxy, session, input="abcd", **options):
    return proxy.sdk(session).responses.create(model="test", input=input, **options)


def result_of(response, output):
    (tool,) = [item for item in response.output if item.type == "function_call"]
    return {"type": "function_call_output", "call_id": tool.call_id, "output": output}


def plain(response):
    """A response without what is null: of tools, that is not recorded."""
    return response.model_dump(exclude_none=True)


@pytest.fixture
def conversation(proxy):
    """A session, and two responses in it, the second one of which goes on from the first."""
    session = proxy.session()
    proxy.engine.enqueue(proxy.says("calc(ab)"), proxy.says("ba"))
    first = ask(proxy, session, tools=[CALC], **OPTIONS)
    second = ask(proxy, session, [result_of(first, "ba")], tools=[CALC], previous_response_id=first.id)
    return session, first, second


def test_a_response_is_shown_as_it_was_answered_by_any_replica(proxy, second, conversation):
    session, first, then = conversation
    for replica in (proxy, second):
        sdk = replica.sdk(session, base_url=f"{replica.url}/v1") if False else replica.sdk(session)
        assert plain(sdk.responses.retrieve(first.id)) == plain(first)
        assert plain(sdk.responses.retrieve(then.id)) == plain(then)


def test_a_streamed_response_is_shown_like_a_whole_one(proxy):
    session = proxy.session()
    proxy.engine.enqueue(proxy.says("calc(ab)"))
    *_, last = ask(proxy, session, tools=[CALC], stream=True, **OPTIONS)
    assert plain(proxy.sdk(session).responses.retrieve(last.response.id)) == plain(last.response)


def test_logprobs_may_be_asked_for_later(proxy):
    session = proxy.session()
    ids = proxy.says("dcba")
    proxy.engine.enqueue(ids)
    response = ask(proxy, session)
    shown = proxy.sdk(session).responses.retrieve(response.id, include=["message.output_text.logprobs"])
    (part,) = shown.output[0].content
    (call,) = proxy.calls(session)
    assert [entry.logprob for entry in part.logprobs] == call["logprobs"]


def test_input_items_are_the_conversation_before_the_answer(proxy, conversation):
    session, first, then = conversation
    sdk = proxy.sdk(session)
    (item,) = sdk.responses.input_items.list(first.id)
    assert (item.role, item.content[0].text) == ("user", "abcd")
    items = list(sdk.responses.input_items.list(then.id, order="asc"))
    assert [item.type for item in items] == ["message", "function_call", "function_call_output"]
    assert items[1].call_id == items[2].call_id == first.output[0].call_id
    assert len({item.id for item in items}) == 3
    pages = sdk.responses.input_items.list(then.id, limit=1)
    assert (len(pages.data), pages.has_more) == (1, True)
    assert list(pages) == items[::-1]  # the newest first, page by page


def test_input_items_can_be_sent_as_input(proxy, conversation):
    session, _, then = conversation
    items = proxy.sdk(session).responses.input_items.list(then.id, order="asc")
    history = [item.model_dump(exclude_none=True) for item in (*items, *then.output)]
    ask(proxy, session, [*history, {"role": "user", "content": "more"}], tools=[CALC])
    last = proxy.calls(session)[-1]
    assert (last["bridged"], last["fork_reason"]) == (True, None)


def test_a_deleted_response_is_gone_for_its_client_and_stays_recorded(proxy, conversation):
    session, first, then = conversation
    before = proxy.calls(session)
    sdk = proxy.sdk(session)
    sdk.responses.delete(first.id)
    for again in (sdk.responses.retrieve, sdk.responses.input_items.list, sdk.responses.delete):
        with pytest.raises(openai.NotFoundError, match=f"has no response '{first.id}'") as gone:
            again(first.id)
        assert gone.value.code == "response_not_found"
    with pytest.raises(openai.BadRequestError) as refused:
        ask(proxy, session, previous_response_id=first.id)
    assert refused.value.code == "previous_response_not_found"
    assert plain(sdk.responses.retrieve(then.id)) == plain(then)
    recorded = ("new_messages", "answer", "output_ids", "logprobs", "trainable", "status")
    for was, call in zip(before, proxy.calls(session), strict=True):
        assert [call[name] for name in recorded] == [was[name] for name in recorded]


def test_an_id_without_a_response_in_the_session_is_not_found(proxy, conversation):
    session, first, _ = conversation
    sdk = proxy.sdk(session)
    chat = sdk.chat.completions.create(model="test", messages=[{"role": "user", "content": "hi"}])
    for name in (chat.id.replace("chatcmpl-", "resp_"), "resp_" + "0" * 32, "resp_1", "é"):
        with pytest.raises(openai.NotFoundError):
            sdk.responses.retrieve(name)
    with pytest.raises(openai.NotFoundError):
        proxy.sdk(proxy.session()).responses.retrieve(first.id)
    with pytest.raises(openai.BadRequestError):
        ask(proxy, session, previous_response_id=chat.id.replace("chatcmpl-", "resp_"))


@pytest.mark.parametrize(
    ("path", "param"),
    [
        ("?stream=true", "stream"),
        ("?include=file_search_results", "include"),
        ("/input_items?before=x", "before"),
        ("/input_items?limit=0", "limit"),
        ("/input_items?limit=101", "limit"),
        ("/input_items?order=up", "order"),
        ("/input_items?after=msg_1", "after"),
    ],
)
def test_an_invalid_query_parameter_is_refused_by_name(proxy, conversation, path, param):
    session, first, _ = conversation
    answer = httpx.get(
        f"{session['base_url']}/responses/{first.id}{path}", headers={"Authorization": f"Bearer {session['api_key']}"}
    )
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_calls_of_a_namespace_are_shown_with_it(proxy):
    session = proxy.session()
    proxy.engine.enqueue(proxy.says("n__calc(ab)"), proxy.says("ba"))
    tools = [{"type": "namespace", "name": "n", "description": "d", "tools": [CALC]}, {"type": "web_search"}]
    url, key = session["base_url"], {"Authorization": f"Bearer {session['api_key']}"}
    body = {"model": "test", "input": "abcd", "tools": tools}
    first = httpx.post(f"{url}/responses", json=body, headers=key).raise_for_status().json()
    (item,) = [item for item in first["output"] if item["type"] == "function_call"]
    assert (item["namespace"], item["name"]) == ("n", "calc")
    shown = httpx.get(f"{url}/responses/{first['id']}", headers=key).raise_for_status().json()
    assert shown["output"] == first["output"]
    result = {"type": "function_call_output", "call_id": item["call_id"], "output": "ba"}
    body |= {"input": [{"role": "user", "content": "abcd"}, *first["output"], result]}
    then = httpx.post(f"{url}/responses", json=body, headers=key).raise_for_status().json()
    before = httpx.get(f"{url}/responses/{then['id']}/input_items", headers=key).raise_for_status().json()["data"]
    assert [(one.get("namespace"), one["name"]) for one in before if one["type"] == "function_call"] == [("n", "calc")]
    calls = proxy.calls(session)
    assert [call["options"]["left_out"] for call in calls] == [["web_search"]] * 2
    assert calls[1]["parent_id"] == calls[0]["id"]
