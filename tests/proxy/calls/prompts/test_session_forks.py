"""Roles and fork reasons of a session's calls, through the official SDK."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from databases import KINDS

from agentrl.store.audit import run_audit
from agentrl.store.training import returns
from agentrl.testing import Reply

from .recorded_talks import ADD, FIND, LONG, OTHER, U1, U2, U3, S, says


def ask(proxy: Any, session: Any, messages: Any, tools: Any = None, **options: Any) -> Any:
    more = {"tools": tools} if tools else {}
    reply = proxy.sdk(session).chat.completions.create(model="test", messages=messages, **more, **options)
    return [choice.message.model_dump(exclude_none=True) for choice in reply.choices]


def forks(proxy: Any, session: Any) -> list[tuple[str, str | None, bool]]:
    return [(call["role"], call["fork_reason"], call["parent_id"] is not None) for call in proxy.calls(session)]


def test_an_extension_that_only_the_tokens_show_is_no_fork(proxy):
    """The client gave the call another id; the chat format prints none."""
    session = proxy.session()
    proxy.engine.enqueue(proxy.says('add({"a":1})'), proxy.says("done"), proxy.says("again"))
    [first] = ask(proxy, session, [U1], [ADD])
    call = first["tool_calls"][0]
    assert call["function"]["name"] == "add"
    renamed = first | {"tool_calls": [call | {"id": "mine"}]}
    talk = [U1, renamed, says("tool", "2", tool_call_id="mine")]
    [second] = ask(proxy, session, talk, [ADD])
    ask(proxy, session, [*talk, second, U2], [ADD])
    assert forks(proxy, session) == [("main", None, False), ("main", None, True), ("main", None, True)]
    one, two, three = proxy.calls(session)
    assert (two["parent_id"], three["parent_id"]) == (one["id"], two["id"])
    assert proxy.engine.requests[1]["input_ids"] == [
        *one["prompt_delta_ids"],
        *one["output_ids"],
        *two["prompt_delta_ids"],
    ]


def test_changed_arguments_fork(proxy):
    session = proxy.session()
    proxy.engine.enqueue(proxy.says('add({"a":1})'), proxy.says("done"))
    [first] = ask(proxy, session, [U1], [ADD])
    call = first["tool_calls"][0]
    other = call | {"function": call["function"] | {"arguments": json.dumps({"a": 7})}}
    talk = [U1, first | {"tool_calls": [other]}, says("tool", "2", tool_call_id=call["id"])]
    ask(proxy, session, talk, [ADD])
    assert forks(proxy, session)[1] == ("main", "arguments_changed", False)


def test_agents_titles_and_compaction_in_one_session(proxy):
    session = proxy.session()
    for text in ("first", LONG, "a title", "found", "more", "go on"):
        proxy.engine.enqueue(proxy.says(text))
    [a1] = ask(proxy, session, [S, U1], [ADD])
    ask(proxy, session, [S, U1, a1, says("user", "sum up")], [ADD])
    ask(proxy, session, [OTHER, U1])
    search = says("system", "search")
    [found] = ask(proxy, session, [search, U2], [FIND])
    ask(proxy, session, [search, U2, found, U3], [FIND])
    ask(proxy, session, [S, says("user", f"So far: {LONG}")], [ADD])
    assert forks(proxy, session) == [
        ("main", None, False),
        ("main", None, True),
        ("side", "other_agent", False),
        ("subagent", "other_agent", False),
        ("subagent", None, True),
        ("main", "compacted", False),
    ]


def test_a_title_that_is_asked_for_beside_the_first_call_is_no_main_call(proxy, until):
    session = proxy.session()
    proxy.engine.enqueue(Reply(proxy.says("first"), hold_after=1), proxy.says("a title"))
    with ThreadPoolExecutor(1) as pool:
        main = pool.submit(ask, proxy, session, [S, U1], [ADD])
        until(lambda: proxy.engine.holding == 1)
        ask(proxy, session, [OTHER, U1])
        ask(proxy, session, [S, U2], [ADD])
        proxy.engine.release()
        main.result()
    assert sorted(forks(proxy, session), key=str) == [
        ("main", "new_conversation", False),
        ("main", None, False),
        ("side", "other_agent", False),
    ]


def finish(proxy: Any, sessions: Any, value: float = 1.0) -> None:
    for one in sessions:
        assert proxy.post(f"/sessions/{one['session_id']}/reward", {"value": value}).status_code == 200
        assert proxy.post(f"/sessions/{one['session_id']}/end").status_code == 200


@pytest.mark.long_on("postgresql")
@pytest.mark.parametrize("database_kind", KINDS)
@pytest.mark.parametrize("said", [None, "main"])
def test_a_title_that_comes_before_the_agent_is_no_turn_of_it(proxy, said):
    """Judged as if the session ended now, in the trace, and at its end wherever its role counts: credit, audit."""
    sessions = proxy.post("/groups").json()["sessions"]
    session = sessions[0]
    headers = {} if said is None else {"X-Turn-Type": said}
    ask(proxy, session, [OTHER, U1], extra_headers=headers)
    ask(proxy, session, [U2])  # a probe
    [a1] = ask(proxy, session, [S, U1], [ADD])
    ask(proxy, session, [S, U1, a1, U2], [ADD])
    roles = [said or "side", "side", "main", "main"]
    assert [role for role, *_ in forks(proxy, session)] == roles
    finish(proxy, sessions)
    title, _, *agent = proxy.calls(session)
    assert [role for role, *_ in forks(proxy, session)] == roles
    with proxy.database.read() as conn:
        assert list(run_audit.scan(conn, proxy.run_id)) == []
        credited = returns.of_sessions(conn, [session["session_id"]], 0.5)[session["session_id"]]
    assert credited.calls[agent[0]["id"]] == 0.5
    assert (title["id"] in credited.calls) == (said is not None)
    assert credited.episode_return == (0.5 if said is None else 0.25)


def test_a_conversation_that_the_agent_takes_over_stays_a_turn_of_it(proxy):
    """A handoff: an agent without tools speaks first, and its turn is in the history of the next."""
    sessions = proxy.post("/groups").json()["sessions"]
    session = sessions[0]
    [a1] = ask(proxy, session, [OTHER, U1])
    ask(proxy, session, [S, U1, a1, U2], [ADD])
    finish(proxy, sessions)
    assert [role for role, *_ in forks(proxy, session)] == ["main", "main"]


def test_the_turn_type_header_overrides_the_rules(proxy):
    session = proxy.session()
    ask(proxy, session, [S, U1], [ADD])
    ask(proxy, session, [OTHER, U2], extra_headers={"X-Turn-Type": "main"})
    assert forks(proxy, session)[1] == ("main", "other_agent", False)


def test_siblings_and_repeated_prompts_have_no_reason(proxy):
    session = proxy.session()
    two = ask(proxy, session, [U1], n=2)
    ask(proxy, session, [U1])
    ask(proxy, session, [U1, two[0], U2], n=2)
    ask(proxy, session, [U1, two[0], U2])
    assert {reason for _, reason, _ in forks(proxy, session)} == {None}
    assert [parent for *_, parent in forks(proxy, session)] == [False] * 3 + [True] * 3


def test_an_edit_behind_a_kept_turn_is_a_branch_with_its_reason(proxy):
    session = proxy.session()
    for text in ("alpha", "beta", "gamma"):
        proxy.engine.enqueue(proxy.says(text))
    [a1] = ask(proxy, session, [U1])
    ask(proxy, session, [U1, a1, U2])
    ask(proxy, session, [U1, a1, U2, says("assistant", "BETA"), U3])
    one, _, three = proxy.calls(session)
    assert (three["parent_id"], three["fork_reason"]) == (one["id"], "history_edited")
