"""`rollout.top_logprobs`: training calls record the likeliest tokens; no client sees more than it asked for."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from sqlalchemy import select

from agentrl.store.audit import run_audit
from agentrl.store.db import codec, likeliest_codec
from agentrl.store.exports import token_rows
from agentrl.store.tables import interaction_data, interactions, trajectories
from agentrl.testing import Reply

from ..conftest import ADMIN, CONFIG, MANY_SESSIONS
from .exchange_clients import BODY, KEY, post

KEPT = 3
TEXT = "hello"
CHAT, COMPLETIONS = "/chat/completions", "/completions"
LOGPROBS = {"include": ["message.output_text.logprobs"]}
REQUESTS = {
    "chat": (CHAT, BODY),
    "chat, logprobs": (CHAT, BODY | {"logprobs": True}),
    "chat, 2": (CHAT, BODY | {"logprobs": True, "top_logprobs": 2}),
    "chat, 5": (CHAT, BODY | {"logprobs": True, "top_logprobs": 5}),
    "chat, stop": (CHAT, BODY | {"logprobs": True, "top_logprobs": 1, "stop": "ll"}),
    "chat, n": (CHAT, BODY | {"n": 2, "logprobs": True, "top_logprobs": 1}),
    "completions": (COMPLETIONS, {"prompt": "ab"}),
    "completions, 0": (COMPLETIONS, {"prompt": "ab", "logprobs": 0}),
    "completions, 1": (COMPLETIONS, {"prompt": "ab", "logprobs": 1}),
    "responses": ("/responses", {"input": "ab"}),
    "responses, logprobs": ("/responses", {"input": "ab"} | LOGPROBS),
    "responses, 2": ("/responses", {"input": "ab", "top_logprobs": 2} | LOGPROBS),
    "messages": ("/messages", {"model": "default", "max_tokens": 16, "messages": BODY["messages"]}),
}
every_request = pytest.mark.parametrize(("path", "body"), REQUESTS.values(), ids=REQUESTS)
whole_or_streamed = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])


@pytest.fixture
def run_config() -> dict[str, Any]:
    return CONFIG | {"rollout": {"group_size": 2, "top_logprobs": KEPT}}


@pytest.fixture
def proxy(shared_proxy):
    return shared_proxy


@pytest.fixture
def plain(module_proxies, tiny_model):
    """The proxy of a run that keeps none."""
    made = module_proxies("sqlite", CONFIG | MANY_SESSIONS, tiny_model)
    made.engine.clear()
    return made


def recorded(proxy, session) -> list[tuple[list[int], list[float], Any]]:
    """(ids, logprobs, likeliest tokens) of a session's calls."""
    query = (
        select(interaction_data)
        .join(interactions, interactions.c.id == interaction_data.c.interaction_id)
        .where(interactions.c.session_id == session["session_id"])
        .order_by(interactions.c.seq)
    )
    with proxy.database.read() as conn:
        rows = conn.execute(query).all()
    return [
        (
            codec.unpack_ids(row.output_ids).tolist(),
            codec.unpack_logprobs(row.logprobs).tolist(),
            row.top_logprobs and likeliest_codec.unpack(row.top_logprobs).rows,
        )
        for row in rows
    ]


def said(text: str) -> list[str]:
    """The lines of an answer without what differs between any two: ids, times, and which choice comes first."""
    return sorted(re.sub(r'[0-9a-f]{32}|"(created|created_at|completed_at)":[\d.]+', "", text).splitlines())


@every_request
@whole_or_streamed
def test_a_client_gets_what_it_gets_from_a_run_that_keeps_none(proxy, plain, path, body, stream):
    texts = []
    for one in (plain, proxy):
        one.engine.enqueue(*[Reply(one.says(TEXT), chunks=[2, 1])] * 2)
        texts.append(said(post(one, one.session(), body | {"stream": stream}, headers={}, path=path).text))
    assert texts[0] == texts[1]


@every_request
@whole_or_streamed
def test_the_likeliest_tokens_of_every_output_token_are_recorded(proxy, path, body, stream):
    session = proxy.session()
    proxy.engine.enqueue(*[Reply(proxy.says(TEXT), chunks=[2, 1])] * 2)
    post(proxy, session, body | {"stream": stream}, headers={}, path=path)
    count = max(KEPT, body.get("top_logprobs", 0))
    assert {request["top_logprobs_num"] for request in proxy.engine.requests} == {count}
    calls = recorded(proxy, session)
    assert len(calls) == body.get("n", 1)
    for ids, logprobs, likeliest in calls:
        assert likeliest == [  # as the fake engine invents them
            [(logprob - k, token + k) for k in range(count)] for token, logprob in zip(ids, logprobs, strict=True)
        ]


@every_request
def test_a_recorded_answer_is_given_again_byte_for_byte(proxy, path, body):
    session = proxy.session()
    proxy.engine.enqueue(*[proxy.says(TEXT)] * 2)
    first, again = (post(proxy, session, body, headers=KEY, path=path) for _ in range(2))
    assert again.content == first.content


def test_an_evaluation_asks_for_what_its_client_asks_for(proxy):
    session = proxy.session(sampling={"temperature": 1.0})
    proxy.engine.enqueue(*[proxy.says(TEXT)] * 2)
    post(proxy, session, headers={})
    post(proxy, session, BODY | {"logprobs": True, "top_logprobs": 1}, headers={})
    assert [request.get("top_logprobs_num") for request in proxy.engine.requests] == [None, 1]
    assert [likeliest and len(likeliest[0]) for _, _, likeliest in recorded(proxy, session)] == [None, 1]


def test_an_answer_that_another_segment_continues_has_all_of_them(proxy, until):
    session = proxy.session()
    ids = proxy.says(TEXT)
    proxy.engine.enqueue(Reply(ids, hold_after=2), ids[2:])
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(post, proxy, session, headers={})
        until(lambda: proxy.engine.holding)
        proxy.http.post(f"{proxy.engine.url}/abort_request", json={"abort_all": True})
        assert answer.result()
    ((output_ids, _, likeliest),) = recorded(proxy, session)
    assert output_ids == ids
    assert [row[0][1] for row in likeliest] == ids


@pytest.mark.parametrize("fork", [False, True])
def test_every_path_has_those_of_its_calls(proxy, fork):
    session = proxy.session()
    first = post(proxy, session, headers={})
    answer = first.json()["choices"][0]["message"]
    for text in ("x", "y")[: 1 + fork]:
        messages = [*BODY["messages"], {"role": "assistant", "content": answer["content"]}]
        post(proxy, session, {"messages": [*messages, {"role": "user", "content": text}]}, headers={})
    proxy.post(f"/sessions/{session['session_id']}/reward", {"value": 1.0})
    assert proxy.post(f"/sessions/{session['session_id']}/end", {"status": "completed"}).status_code == 200
    rows = proxy.database.query(token_rows.of_session, session["session_id"])
    assert len(rows) == 1 + fork
    for row in rows:
        sampled = np.flatnonzero(row["turn_ids"] >= 0)
        places = [call["start"] + np.arange(len(call["ids"])) for call in row["top_logprobs"]]
        np.testing.assert_array_equal(np.concatenate(places), sampled)
        for call, where in zip(row["top_logprobs"], places, strict=True):
            np.testing.assert_array_equal(call["ids"], row["input_ids"][where][:, None] + np.arange(KEPT))
            np.testing.assert_array_equal(call["logprobs"], row["logprobs"][where][:, None] - np.arange(KEPT))
    of_run = f"/api/runs/{proxy.run_id}/trajectories/{rows[0]['trajectory_id']}/tokens"
    told = proxy.get(of_run, headers=ADMIN)["top_logprobs"]
    assert [call["ids"] for call in told] == [call["ids"].tolist() for call in rows[0]["top_logprobs"]]
    with proxy.database.read() as conn:
        assert conn.execute(select(trajectories.c.id)).first() is not None
        assert list(run_audit.scan(conn, proxy.run_id)) == []
