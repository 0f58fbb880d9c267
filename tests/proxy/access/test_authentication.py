"""Admin, run and session keys are different powers, at every route; they rotate, expire and are revoked everywhere."""

from __future__ import annotations

import re
import time
from typing import Any

import anthropic
import openai
import pytest
from databases import KINDS
from sqlalchemy import update
from starlette.routing import Route

from agentrl.domain.schemas import Power
from agentrl.proxy.access import keyring
from agentrl.proxy.api_docs.openapi import OPEN_ROUTES
from agentrl.proxy.app import routes
from agentrl.proxy.dialects import of_request
from agentrl.store import key_records as store
from agentrl.store.tables import keys

ADMIN = {"Authorization": "Bearer admin-key"}
RUN = {"Authorization": "Bearer run-key"}
DESCRIPTIONS = {"/docs", "/docs/oauth2-redirect", "/redoc", "/openapi.json"}
ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
BODIES: dict[str, Any] = {
    "/chat/completions": ASK,
    "/completions": {"prompt": "hi", "max_tokens": 4},
    "/responses": {"input": "hi"},
    "/messages": {**ASK, "model": "default"},
    "/messages/count_tokens": {"model": "default", "messages": ASK["messages"]},
    "/heartbeat": {"owner": "w/1"},
    "/groups/abandon": {"owner": "w/1"},
    "/groups": {},
    "/sessions": {},
    "/admin/publish": {"version": 0},
    "/api/keys": {"power": "run", "name": "x"},
    "/sessions/{session_id}/reward": {"value": 1.0},
    "/sessions/{session_id}/heartbeat": {},
    "/api/engines/join": {"url": "http://e"},
    "/api/engines/leave": {"url": "http://e"},
    "/api/engines/release": {"epoch": 0},
    "/api/engines/reload": {"epoch": 0},
    "/api/engines/drain": {"url": "http://e"},
    "/api/engines/resume": {"url": "http://e"},
    "/export_trajectories": {"session_id": "0" * 32},
    "/rl/start_session": {"task_id": "t"},
    "/rl/set_reward": {"reward": 1.0},
}


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def table() -> list[tuple[str, str]]:
    """Every (method, path) of the app but those that need no key."""
    found = set()
    for path, operations in routes().openapi()["paths"].items():
        found |= {(method.upper(), path) for method in operations}
    for route in routes().routes:
        if isinstance(route, Route):
            found |= {(method, route.path) for method in (route.methods or set()) - {"HEAD"}}
    needless = (*OPEN_ROUTES, *DESCRIPTIONS, "/")  # `/` leads to the pages, which need a key
    return sorted((m, p) for m, p in found if p not in needless)


def power_of(method: str, path: str) -> Power:
    """The least power that a route takes."""
    if path.startswith(("/admin/", "/api/keys", "/api/engines/", "/versions/")):
        return Power.ADMIN
    if path.startswith("/api/") or path in ("/groups", "/groups/abandon", "/heartbeat", "/sessions/{session_id}/key"):
        return Power.RUN
    if path in ("/grant_capacity", "/rl/start_session", "/export_trajectories"):
        return Power.RUN
    return Power.SESSION


def body_of(path: str) -> Any:
    return next((body for end, body in BODIES.items() if path.endswith(end)), {})


class Caller:
    """Asks routes by their templates."""

    def __init__(self, proxy: Any, session_id: str) -> None:
        self.proxy = proxy
        self.names = {"session_id": session_id, "run_id": proxy.run_id, "step": "1", "model": "default"}

    def __call__(self, method: str, path: str, headers: dict[str, str]) -> Any:
        url = self.proxy.url + re.sub(r"\{(\w+)(:\w+)?\}", lambda found: self.names.get(found[1], "x"), path)
        body = {} if method == "GET" else {"json": body_of(path)}
        return self.proxy.http.request(method, url, headers=headers, **body)


def assert_refused(answer: Any, path: str, status: int, code: str) -> None:
    """With the status, and in the shape, that the route's SDK turns into its own exception."""
    assert answer.status_code == status, (path, answer.text)
    error = answer.json()["error"]
    if of_request(path, {}).name == "anthropic.messages":
        assert answer.json()["type"] == "error"
        assert error["type"] == {401: "authentication_error", 403: "permission_error"}[status]
    else:
        assert error["code"] == code, path
    assert error["message"]


@pytest.fixture
def session(proxy: Any) -> Any:
    return proxy.session()


@pytest.fixture
def ended(proxy: Any) -> dict[str, str]:
    """Keys of every power that have ended, by how."""
    db, run_id = proxy.database, proxy.run_id
    found = {}
    for power in (Power.ADMIN, Power.RUN):
        made = db.transact(store.create, run_id, power, f"old-{power}", time.time() + 3600)
        with db.write() as conn:
            conn.execute(update(keys).where(keys.c.id == made.id).values(expires_at=time.time() - 1))
        found[f"expired {power}"] = made.key
        made = db.transact(store.create, run_id, power, f"gone-{power}")
        db.transact(store.revoke, run_id, made.id)
        found[f"revoked {power}"] = made.key
    old = proxy.session()
    assert proxy.post(f"/sessions/{old['session_id']}/key").status_code in (200, 201)
    found["expired session"] = old["api_key"]
    return found


def final(status: int, method: str, path: str) -> int:
    """The status of an error that no repetition mends: a 400 where Codex asks, which would try others again."""
    return 400 if method == "POST" and path.endswith("/v1/responses") else status


def test_the_table_holds_every_route() -> None:
    found = table()
    assert len(found) >= 40
    assert ("POST", "/v1/chat/completions") in found
    assert ("POST", "/sessions/{session_id}/v1/messages") in found
    assert {power_of(*row) for row in found} == set(Power)


def test_every_route_refuses_a_missing_a_wrong_and_an_ended_key(proxy, session, ended) -> None:
    ask = Caller(proxy, session["session_id"])
    for method, path in table():
        assert_refused(ask(method, path, {}), path, 401, "missing_api_key")
        for none in ({"Authorization": "Bearer"}, {"Authorization": "Basic YWRtaW4ta2V5"}, {"x-api-key": ""}):
            assert_refused(ask(method, path, none), path, 401, "missing_api_key")
        for wrong in ("wrong", "admin-key2", "Admin-key", "arl-admin-" + "x" * 32, "run-ke"):
            assert_refused(ask(method, path, bearer(wrong)), path, 401, "invalid_api_key")
            assert_refused(ask(method, path, {"x-api-key": wrong}), path, 401, "invalid_api_key")
        for how, key in ended.items():
            assert_refused(ask(method, path, bearer(key)), path, 401, f"{how.split()[0]}_api_key")


def test_every_route_refuses_a_key_of_lower_power(proxy, session) -> None:
    ask = Caller(proxy, session["session_id"])
    lower = {Power.ADMIN: [RUN, bearer(session["api_key"])], Power.RUN: [bearer(session["api_key"])], Power.SESSION: []}
    refused = 0
    for method, path in table():
        for headers in lower[power_of(method, path)]:
            assert_refused(ask(method, path, headers), path, 403, "forbidden")
            refused += 1
    assert refused >= 15


def test_a_route_of_a_session_refuses_the_key_of_another(proxy, session) -> None:
    other = bearer(proxy.session()["api_key"])
    ask = Caller(proxy, session["session_id"])
    named = [row for row in table() if "{session_id}" in row[1] and power_of(*row) is Power.SESSION]
    asked = [row for row in named if "/v1/models" not in row[1]]  # which tells the same to everybody
    assert len(asked) >= 12
    for method, path in asked:
        assert_refused(ask(method, path, other), path, final(403, method, path), "forbidden")
    for path in ("/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/completions"):
        named_by_header = other | {"X-Session-ID": session["session_id"]}
        assert_refused(ask("POST", path, named_by_header), path, final(403, "POST", path), "forbidden")


def test_a_sealed_session_refuses_late_calls_with_409(proxy, session) -> None:
    sealed = bearer(session["api_key"])
    ask = Caller(proxy, session["session_id"])
    assert ask("POST", "/sessions/{session_id}/end", sealed).status_code == 200
    for prefix in ("", "/sessions/{session_id}"):
        for path in ("/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/completions"):
            answer = ask("POST", prefix + path, sealed)
            assert answer.status_code == final(409, "POST", path), answer.text
            assert "is sealed" in answer.json()["error"]["message"]
    assert ask("POST", "/sessions/{session_id}/reward", sealed).status_code == 200
    assert ask("POST", "/sessions/{session_id}/key", RUN).status_code == 409


def test_the_sdks_raise_their_own_errors(proxy, session) -> None:
    wrong = openai.OpenAI(base_url=proxy.url + "/v1", api_key="wrong", max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        wrong.chat.completions.create(model="default", messages=ASK["messages"])
    claude = anthropic.Anthropic(base_url=proxy.url, api_key="wrong", max_retries=0)
    with pytest.raises(anthropic.AuthenticationError):
        claude.messages.create(model="default", max_tokens=4, messages=ASK["messages"])
    other = openai.OpenAI(base_url=session["base_url"], api_key=proxy.session()["api_key"], max_retries=0)
    with pytest.raises(openai.PermissionDeniedError):
        other.chat.completions.create(model="default", messages=ASK["messages"])


def test_an_admin_makes_lists_rotates_and_revokes_keys(proxy) -> None:
    made = proxy.post("/api/keys", {"power": "run", "name": "ci", "expires_in_s": 3600}, headers=ADMIN).json()
    assert re.fullmatch(r"arl-run-[A-Za-z0-9_-]{32}", made["key"])
    assert proxy.post("/groups", headers=bearer(made["key"])).status_code == 201
    listed = proxy.get("/api/keys", headers=ADMIN)
    assert [(k["name"], k["power"], k["state"]) for k in listed] == [("first", "run", "valid"), ("ci", "run", "valid")]
    assert listed[1]["expires_at"] == made["expires_at"]
    assert made["key"] not in str(listed)
    rotated = proxy.post("/api/keys/ci/rotate", {"overlap_s": 0}, headers=ADMIN).json()
    assert proxy.post("/groups", headers=bearer(made["key"])).json()["error"]["code"] == "expired_api_key"
    assert proxy.get("/api/run", headers=bearer(rotated["key"]))["name"] == "test"
    assert proxy.http.delete(f"{proxy.url}/api/keys/{rotated['id']}", headers=ADMIN).status_code == 200
    assert proxy.post("/groups", headers=bearer(rotated["key"])).json()["error"]["code"] == "revoked_api_key"
    assert proxy.http.delete(f"{proxy.url}/api/keys/nobody", headers=ADMIN).status_code == 404


def test_an_admin_key_of_the_store_has_the_power_of_the_proxys_own(proxy) -> None:
    made = proxy.post("/api/keys", {"power": "admin", "name": "ops"}, headers=ADMIN).json()
    assert made["key"].startswith("arl-admin-")
    assert proxy.get("/api/keys", headers=bearer(made["key"]))
    assert proxy.post("/admin/publish", {"version": 0}, headers=bearer(made["key"])).status_code == 200


def test_a_session_gets_another_key_from_the_run_and_never_from_itself(proxy, session) -> None:
    path = f"/sessions/{session['session_id']}/key"
    old = bearer(session["api_key"])
    assert proxy.post(path, headers=old).status_code == 403
    first = proxy.post(path, {"overlap_s": 60}).json()["api_key"]
    for key in (session["api_key"], first):
        assert proxy.post("/v1/chat/completions", ASK, headers=bearer(key)).status_code == 200
    assert proxy.post(path).json()["api_key"] != first
    for key in (session["api_key"], first):
        assert proxy.post("/v1/chat/completions", ASK, headers=bearer(key)).status_code == 401
    assert proxy.post("/sessions/" + "0" * 32 + "/key").status_code == 404


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"power": "session", "name": "x"}, "power"),
        ({"power": "root", "name": "x"}, "power"),
        ({"power": "run", "name": ""}, "name"),
        ({"power": "run", "name": "x", "expires_in_s": 0}, "expires_in_s"),
        ({"power": "run", "name": "x", "expires_in_s": 1e300}, "expires_in_s"),
        ({"power": "run"}, "name"),
        ({"power": "run", "name": "x", "key": "mine"}, "key"),
    ],
)
def test_invalid_key_parameters_are_refused_by_name(proxy, body, param) -> None:
    answer = proxy.post("/api/keys", body, headers=ADMIN)
    assert answer.status_code == 422
    assert answer.json()["error"]["param"] == param


@pytest.fixture
def short_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keyring, "REFRESH_EVERY_S", 0.05)


@pytest.mark.parametrize("database_kind", KINDS)
def test_what_one_replica_revokes_every_other_refuses(short_look, proxy, second, until) -> None:
    made = proxy.post("/api/keys", {"power": "run", "name": "ci"}, headers=ADMIN).json()
    session = proxy.session()
    for replica in (proxy, second):  # both have used the keys
        assert replica.post("/v1/chat/completions", ASK, headers=bearer(session["api_key"])).status_code == 200
        assert replica.get("/api/run", headers=bearer(made["key"]))
    assert proxy.http.delete(f"{proxy.url}/api/keys/ci", headers=ADMIN).status_code == 200
    new = proxy.post(f"/sessions/{session['session_id']}/key").json()["api_key"]
    assert second.post("/v1/chat/completions", ASK, headers=bearer(new)).status_code == 200
    until(lambda: second.post("/groups", headers=bearer(made["key"])).status_code == 401)
    until(lambda: second.post("/v1/chat/completions", ASK, headers=bearer(session["api_key"])).status_code == 401)


def test_the_runs_own_key_may_be_revoked_or_replaced_while_the_proxy_runs(short_look, proxy, until) -> None:

    from agentrl.store.db.codec import hash_key
    from agentrl.store.tables import runs

    with proxy.database.write() as conn:
        conn.execute(update(runs).values(key_hash=hash_key("another")))
    until(lambda: proxy.post("/groups", headers=bearer("another")).status_code == 201)
    until(lambda: proxy.post("/groups", headers=RUN).status_code == 401)
    proxy.database.transact(store.revoke, proxy.run_id, "first")
    until(lambda: proxy.post("/groups", headers=bearer("another")).status_code == 401)


def test_a_call_asks_the_database_for_no_key_that_it_knows(proxy, second, session, monkeypatch) -> None:
    asked = []
    real = store.find

    def find(conn: Any, run_id: str, key_hash: str) -> Any:
        asked.append(key_hash)
        return real(conn, run_id, key_hash)

    monkeypatch.setattr(store, "find", find)
    for _ in range(3):
        assert proxy.post("/v1/chat/completions", ASK, headers=bearer(session["api_key"])).status_code == 200
        assert proxy.get("/api/run", headers=RUN)
        assert proxy.get("/api/run", headers=ADMIN)
    assert asked == []  # the session was opened here
    for _ in range(3):
        assert second.post("/v1/chat/completions", ASK, headers=bearer(session["api_key"])).status_code == 200
    assert len(asked) == 1
