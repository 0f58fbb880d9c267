"""Sub-agents that name themselves in the headers of their model calls."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from databases import KINDS

from agentrl.store.training import returns

pytestmark = pytest.mark.parametrize("database_kind", KINDS)


def ask(proxy: Any, name: str, parent: str, *, key: str = "run-key", url: str = "/v1") -> Any:
    sdk = openai.OpenAI(base_url=proxy.url + url, api_key=key, max_retries=0)
    headers = {"X-Session-ID": name, "x-parent-session-id": parent}
    headers = {header: value for header, value in headers.items() if value}
    messages: Any = [{"role": "user", "content": "ab"}]
    return sdk.chat.completions.create(model="test", messages=messages, extra_headers=headers)


def session_of(proxy: Any, reply: Any) -> dict[str, Any]:
    with proxy.database.read() as conn:
        from sqlalchemy import select

        from agentrl.store.tables import interactions

        call_id = reply.id.removeprefix("chatcmpl-")
        session_id = conn.execute(select(interactions.c.session_id).where(interactions.c.id == call_id)).scalar_one()
    found: dict[str, Any] = proxy.get(f"/sessions/{session_id}")
    return found


def test_the_first_call_opens_the_session_and_the_next_ones_find_it(proxy, second):
    parent = proxy.session()
    pid, own = parent["session_id"], {"key": parent["api_key"]}
    search = [
        ask(proxy, "search", pid),
        ask(second, "search", pid),
        ask(proxy, "search", pid, **own),
        ask(proxy, "search", pid, **own, url=f"/sessions/{pid}/v1"),
    ]
    found = [session_of(proxy, reply) for reply in search]
    assert len({s["session_id"] for s in found}) == 1
    assert (found[0]["parent_session_id"], found[0]["metadata"]) == (pid, {"name": "search"})
    assert found[0]["group_id"] == proxy.get(f"/sessions/{pid}")["group_id"]
    assert found[-1]["interactions"] == 4
    other = session_of(proxy, ask(proxy, "write", pid))
    assert other["session_id"] not in (pid, found[0]["session_id"])
    assert proxy.get("/api/run")["admitted"] == 1


@pytest.mark.long_on("postgresql")
def test_the_same_name_under_another_parent_is_another_sub_agent(proxy):
    parents = proxy.post("/groups").json()["sessions"]
    one, two = (session_of(proxy, ask(proxy, "search", p["session_id"])) for p in parents)
    assert one["session_id"] != two["session_id"]
    assert [one["parent_session_id"], two["parent_session_id"]] == [p["session_id"] for p in parents]


@pytest.mark.long_on("postgresql")
def test_a_session_that_was_opened_before_is_found_by_its_id_or_its_key(proxy):
    parent = proxy.session()
    pid = parent["session_id"]
    child = proxy.post("/sessions", {"parent_session_id": pid}).json()
    for reply in (
        ask(proxy, child["session_id"], pid),
        ask(proxy, child["session_id"], pid, key=child["api_key"]),
        ask(proxy, "", pid, key=child["api_key"]),
        ask(proxy, "", pid, url=f"/sessions/{child['session_id']}/v1"),
    ):
        assert session_of(proxy, reply)["session_id"] == child["session_id"]
    assert session_of(proxy, ask(proxy, pid, pid))["session_id"] == pid


@pytest.mark.long_on("postgresql")
@pytest.mark.parametrize(
    ("name", "parent", "status", "code"),
    [
        ("", "PARENT", 400, "invalid_parameter"),
        ("x" * 201, "PARENT", 400, "invalid_parameter"),
        ("search", "nobody", 404, "session_not_found"),
    ],
)
def test_an_invalid_sub_agent_name_is_refused(proxy, name, parent, status, code):
    parent = parent.replace("PARENT", proxy.session()["session_id"])
    with pytest.raises(openai.APIStatusError) as told:
        ask(proxy, name, parent)
    assert (told.value.status_code, told.value.code) == (status, code)


@pytest.mark.long_on("postgresql")
def test_another_key_opens_no_sub_agent_of_a_session(proxy):
    parent, stranger = proxy.post("/groups").json()["sessions"]
    with pytest.raises(openai.APIStatusError) as told:
        ask(proxy, "search", parent["session_id"], key=stranger["api_key"])
    assert told.value.status_code == 403


@pytest.mark.long_on("postgresql")
def test_a_named_sub_agent_ends_with_its_parent_and_shares_its_outcome(proxy):
    parent = proxy.session()
    pid = parent["session_id"]
    ask(proxy, "", "", key=parent["api_key"])
    sub = session_of(proxy, ask(proxy, "search", pid))["session_id"]
    proxy.post(f"/sessions/{pid}/reward", {"value": 0.5})
    proxy.post(f"/sessions/{pid}/end")
    for name in ("search", "late"):
        with pytest.raises(openai.APIStatusError) as told:
            ask(proxy, name, pid)
        assert (told.value.status_code, told.value.code) == (409, "session_sealed")
    with proxy.database.read() as conn:
        assert list(returns.of_sessions(conn, [sub], 1.0)[sub].calls.values()) == [0.5]
