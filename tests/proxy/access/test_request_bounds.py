"""What callers send is stored within bounds, or refused by name: metadata, tasks, errors, names, keys, parameters."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from databases import KINDS
from sqlalchemy import Connection, select

from agentrl.proxy.access import request_bounds
from agentrl.store.db import codec
from agentrl.store.tables import engines as engines_table
from agentrl.store.tables import interactions as interactions_table
from agentrl.store.training import rewards

RUN = {"Authorization": "Bearer run-key"}
HELLO = [{"role": "user", "content": "ab"}]


def padded(size_bytes: int) -> dict[str, Any]:
    """JSON of this size."""
    return {"x": "y" * (size_bytes - len(orjson.dumps({"x": ""})))}


def bearer(session: dict[str, Any]) -> dict[str, str]:
    return {"Authorization": f"Bearer {session['api_key']}"}


@pytest.mark.parametrize(
    ("path", "body", "most", "headers"),
    [
        ("/sessions", "metadata", request_bounds.METADATA_BYTES, {}),
        ("/sessions", "task", request_bounds.TASK_BYTES, {}),
        ("/sessions", "child's metadata", request_bounds.METADATA_BYTES, {}),
        ("/groups", "metadata", request_bounds.METADATA_BYTES, {}),
        ("/groups", "task", request_bounds.TASK_BYTES, {}),
    ],
)
def test_the_sizes_of_metadata_and_tasks_are_bounded(proxy: Any, path: str, body: str, most: int, headers: Any) -> None:
    name = body.rpartition(" ")[2]
    rest: dict[str, Any] = {"is_eval": True, "task": {}} if path == "/groups" else {}
    if body.startswith("child"):
        rest = {"parent_session_id": proxy.session()["session_id"]}
    assert proxy.post(path, rest | {name: padded(most)}).status_code == 201
    refused = proxy.post(path, rest | {name: padded(most + 1)})
    assert (refused.status_code, refused.json()["error"]["param"]) == (422, name)
    assert f"at most {most} are stored" in refused.json()["error"]["message"]


@pytest.mark.parametrize("database_kind", KINDS)
def test_a_long_error_ends_its_session_and_its_beginning_is_kept(proxy: Any) -> None:
    for error in ("é" * 30_000, "a\0b" * 3000, "x" * codec.ERROR_BYTES):
        session = proxy.session()
        ended = proxy.post(f"/sessions/{session['session_id']}/end", {"status": "failed", "error": error})
        assert (ended.status_code, ended.json()["status"]) == (200, "failed")
        kept = proxy.get(f"/sessions/{session['session_id']}")["error"]
        assert len(kept.encode()) <= codec.ERROR_BYTES
        assert error.replace("\0", "\ufffd").startswith(kept.removesuffix(codec.CUT.decode()))
        assert kept.endswith(codec.CUT.decode()) == (len(error.encode()) > codec.ERROR_BYTES)


@pytest.mark.parametrize(
    ("name", "most"),
    [("name", 100), ("source", 100), ("idempotency_key", 200), ("interaction_id", 200), ("scope", 100)],
)
def test_names_in_a_reward_are_bounded(proxy: Any, name: str, most: int) -> None:
    session = proxy.session()
    refused = proxy.post(f"/sessions/{session['session_id']}/reward", {"value": 1, name: "x" * (most + 1)})
    assert (refused.status_code, refused.json()["error"]["param"]) == (422, name)


def test_keys_and_names_in_headers_are_bounded(proxy: Any) -> None:
    session = proxy.session()
    long = "x" * 201
    parent = {"x-parent-session-id": session["session_id"], "X-Session-ID": long}
    for path, body, headers in (
        ("/sessions", {}, {"Idempotency-Key": long}),
        (f"/sessions/{session['session_id']}/reward", {"value": 1}, {"Idempotency-Key": long}),
        ("/v1/chat/completions", {"messages": HELLO}, parent),
        (f"/sessions/{session['session_id']}/v1/chat/completions", {"messages": HELLO}, {"Idempotency-Key": long}),
        ("/sessions", {"parent_session_id": long}, {}),
    ):
        assert proxy.post(path, body, headers=RUN | headers).status_code in (400, 422), path


def test_the_number_of_rewards_of_a_session_is_bounded(proxy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewards, "MAX_REWARDS", 2)
    path = f"/sessions/{proxy.session()['session_id']}/reward"
    for key in ("a", "b"):
        assert proxy.post(path, {"value": 1, "idempotency_key": key}).status_code == 200
    refused = proxy.post(path, {"value": 1})
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "session_limit_reached")
    assert proxy.post(path, {"value": 1, "idempotency_key": "a"}).status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/responses", {"input": "ab", "metadata": {"a": "x" * 300_000}}, "response"),
        ("/responses", {"input": "ab", "user": "x" * 300_000}, "response"),
    ],
)
def test_the_size_of_the_parameters_of_a_call_is_bounded(proxy: Any, path: str, body: Any, param: str) -> None:
    session = proxy.session()
    refused = proxy.post(f"/sessions/{session['session_id']}/v1{path}", body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_parameter")
    assert proxy.database.query(_rows, interactions_table) == []


def test_long_names_in_a_stored_refusal_are_truncated(proxy: Any) -> None:
    session = proxy.session()
    proxy.post("/v1/chat/completions", {"messages": HELLO, "x" * 300_000: 1}, headers=bearer(session))
    (refusal,) = proxy.get(f"/sessions/{session['session_id']}/refusals")
    assert len(orjson.dumps(refusal)) < 2000


def test_a_long_engine_error_is_truncated(proxy: Any) -> None:
    from agentrl.store import fleet

    url = proxy.engine.url
    seen = {"state": "dead", "version": None, "error": "x" * 100_000, "replica": "r", "joined": False}
    proxy.database.transact(fleet.save, proxy.run_id, url, known=10**6, **seen)
    (row,) = proxy.database.query(_rows, engines_table)
    assert len(row.error) == codec.ERROR_BYTES


def _rows(conn: Connection, table: Any) -> list[Any]:
    return list(conn.execute(select(table)))


ODD = ["9" * 5000, "-1", "1e999", "nan", "\u0663", "%00", "x" * 5000, "0x1F", "1" * 19, ""]


def test_odd_numbers_and_ids_in_addresses_are_client_errors(proxy: Any) -> None:
    """Every path parameter and every query parameter of every route, with what breaks `int`, or a database's column."""
    session = proxy.session()
    proxy.engine.enqueue(proxy.says("fine"))
    proxy.sdk(session).responses.create(model="test", input="ab")
    described = proxy.http.get(f"{proxy.url}/openapi.json").json()["paths"]
    (call,) = proxy.calls(session)
    known = {
        "session_id": session["session_id"],
        "run_id": proxy.run_id,
        "response_id": f"resp_{call['id']}",
        "step": "1",
        "trajectory_id": "some",
        "key": "first",
        "model": "test",
    }
    with_query = {  # plain routes, which OpenAPI does not tell the query of
        "/v1/responses/{response_id}/input_items": ["limit", "after", "order"],
        "/v1/responses/{response_id}": ["include"],
    }
    asked = 0
    for path, methods in described.items():
        for method, route in methods.items():
            if method == "delete":
                continue
            parameters = [p for p in route.get("parameters", []) if p["in"] in ("path", "query")]
            names = {p["name"]: p["in"] for p in parameters}
            names |= dict.fromkeys(with_query.get(path.removeprefix("/sessions/{session_id}"), []), "query")
            for name, place in names.items():
                for value in ODD:
                    values = known | ({name: value} if place == "path" else {})
                    url = proxy.url + path.format(**values) + (f"?{name}={value}" if place == "query" else "")
                    answer = proxy.http.request(
                        method,
                        url,
                        json={} if method == "post" else None,
                        headers=bearer(session) if "v1" in path else RUN,
                    )
                    assert answer.status_code < 500, (method, url[:200], answer.text)
                    asked += 1
    assert asked > 200


@pytest.mark.parametrize("limit", ["1" + "0" * 4999, "000000001" + "0" * 4991, "9" * 5000])
def test_a_page_of_input_items_is_not_asked_for_by_thousands_of_digits(proxy: Any, limit: str) -> None:
    session = proxy.session()
    proxy.engine.enqueue(proxy.says("fine"))
    then = proxy.sdk(session).responses.create(model="test", input="ab")
    url = f"{session['base_url']}/responses/{then.id}/input_items?limit={limit}"
    answer = proxy.http.get(url, headers=bearer(session))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "limit")


def test_a_number_of_thousands_of_digits_in_a_body_is_no_json(proxy: Any) -> None:
    digits = "9" * 5000
    path = f"/sessions/{proxy.session()['session_id']}"
    for route, body in (
        ("/groups", f'{{"size": {digits}}}'),
        ("/sessions", f'{{"metadata": {{"x": {digits}}}}}'),
        (path + "/reward", f'{{"value": {digits}}}'),
        ("/rl/set_reward", f'{{"reward": {digits}}}'),
        (path + "/v1/chat/completions", f'{{"messages": [], "max_tokens": {digits}}}'),
    ):
        answer = proxy.http.post(proxy.url + route, content=body, headers=RUN)
        assert answer.status_code in (400, 422), (route, answer.text)
