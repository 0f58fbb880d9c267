"""Roles and reasons of calls that extend nothing: as pure rules, then through the official SDK."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from databases import KINDS
from hypothesis import given
from hypothesis import strategies as st

from agentrl.domain.schemas import ForkReason, Role
from agentrl.domain.tokens import TokenIds
from agentrl.proxy.calls.prompts.fork_evidence import Evidence
from agentrl.proxy.calls.prompts.fork_rules import RULES, deciding_rule, judge, judge_branch, raw_place
from agentrl.proxy.calls.token_tree import Tree
from agentrl.rendering.conversation import canonical
from agentrl.rendering.divergence import leading_system
from agentrl.store.audit import run_audit
from agentrl.store.calls.call_tree import Node
from agentrl.store.calls.conversations import Conversation
from agentrl.store.training import returns
from agentrl.testing import Reply

ADD = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}
FIND = {"type": "function", "function": {"name": "find", "parameters": {"type": "object", "properties": {}}}}
LONG = "The user has two apples and wants more."


def says(role, content, **more):
    return {"role": role, "content": content, **more}


S, U1, A1, U2, A2, U3 = (
    says("system", "be brief"),
    says("user", "one"),
    says("assistant", LONG),
    says("user", "two"),
    says("assistant", "second"),
    says("user", "three"),
)
OTHER = says("system", "write a title")


U4 = says("user", "four")


def recorded(messages, tools=None, role="main", id="x", finish="stop"):
    n = leading_system(messages)
    system = [canonical(message) for message in messages[:n]]
    return Conversation(
        call_id=id, role=role, system=system, messages=messages[n:], tools=tools, options={}, finish=finish
    )


MAIN = [recorded([S, U1, A1], [ADD]), recorded([S, U1, A1, U2, A2], [ADD])]
BARE = [recorded([S, U1, A1]), recorded([S, U1, A1, U2, A2])]
SUMMED = [recorded([S, U1, A2], [ADD]), recorded([S, U1, A2, U2, A1], [ADD])]  # A1 is asked for behind A2
WORKED = [
    recorded(
        [
            S,
            U1,
            says("assistant", None, tool_calls=[{"id": "c", "function": {"name": "add"}}]),
            says("tool", "2", tool_call_id="c"),
            A1,
        ],
        [ADD],
    )
]
TIMED = [recorded([says("system", "Be brief. It is Mon 10:02."), U1, A2, U2, A1], [ADD])]
TEN_PAST = says("system", "Be brief. It is Tue 10:10.")
OWN = "There are two books about apples."
SAME = says("tool", "nothing new")
CHECK = recorded([OTHER, says("user", "Is this right? second"), says("assistant", "yes")], role="side")
SUB = recorded([says("system", "search"), U1, A2], [FIND], role="subagent")


PLACES = [
    (MAIN, [S, U1], [ADD], (Role.MAIN, None)),  # the same prompt again
    (MAIN, [S, U1, says("assistant", "edited"), U2], [ADD], (Role.MAIN, ForkReason.HISTORY_EDITED)),
    (MAIN, [S, says("user", "1"), A1, U2], [ADD], (Role.MAIN, ForkReason.HISTORY_EDITED)),
    (MAIN, [says("system", "it is 10:02"), U1, A1, U2], [ADD], (Role.MAIN, ForkReason.HISTORY_EDITED)),
    (MAIN, [S, U1, A1, U2], [FIND], (Role.MAIN, ForkReason.TOOLS_CHANGED)),
    (MAIN, [S, U1, A1, U2, A2, U3], None, (Role.MAIN, ForkReason.TOOLS_CHANGED)),
    (MAIN, [S, U1, A1, U3], [FIND], (Role.MAIN, ForkReason.TOOLS_CHANGED)),
    (MAIN, [S, U1], None, (Role.MAIN, ForkReason.TOOLS_CHANGED)),
    (MAIN, [OTHER, U1, A1, U2], [FIND], (Role.MAIN, ForkReason.OTHER_AGENT)),  # a handoff
    # other tools over an edited history, with another system prompt or without: the edit comes first
    (MAIN, [OTHER, U3, A1, U2], [FIND], (Role.MAIN, ForkReason.HISTORY_EDITED)),
    (MAIN, [S, U3, A1, U2], [FIND], (Role.MAIN, ForkReason.HISTORY_EDITED)),
    # two questions before the first answer, and one of them differs: the call repeats no sampled message
    (
        [recorded([S, U1, U2, A2], [ADD]), recorded([U3, A2], role="side")],
        [S, U1, U4],
        [ADD],
        (Role.MAIN, ForkReason.NEW_CONVERSATION),
    ),
    # the same two questions, then an answer that was never sampled
    (
        [recorded([S, U1, U2, A2], [ADD])],
        [S, U1, U4, says("assistant", "own"), U3],
        [ADD],
        (Role.MAIN, ForkReason.HISTORY_EDITED),
    ),
    ([MAIN[0]], [S, U1, U3], [ADD], (Role.MAIN, ForkReason.HISTORY_EDITED)),  # its only answer was dropped
    (MAIN, [S, U2, A2, U3], [ADD], (Role.MAIN, ForkReason.COMPACTED)),
    (SUMMED, [S, says("user", f"Summary: {LONG}")], [ADD], (Role.MAIN, ForkReason.COMPACTED)),
    (SUMMED, [S, says("user", "second, that is")], [ADD], (Role.MAIN, ForkReason.NEW_CONVERSATION)),  # too short
    # a quoted question is no quoted answer
    (
        [recorded([S, U1, A2, says("user", LONG), A2], [ADD])],
        [S, says("user", f"So far: {LONG}")],
        [ADD],
        (Role.MAIN, ForkReason.NEW_CONVERSATION),
    ),
    # a second task that quotes the result of the first; and the first task once more
    (MAIN, [S, says("user", f"Improve: {LONG}")], [ADD], (Role.MAIN, ForkReason.NEW_CONVERSATION)),
    (WORKED, [S, says("user", f"Improve: {LONG}")], [ADD], (Role.MAIN, ForkReason.NEW_CONVERSATION)),
    (WORKED, [S, U1, says("user", f"So far: {LONG}")], [ADD], (Role.MAIN, ForkReason.COMPACTED)),
    (
        [recorded([S, U1, A1], [ADD]), recorded([S, U1, A1, says("tool", "x"), says("assistant", OWN)], [ADD])],
        [S, says("user", f"1. {LONG} 2. {OWN}")],
        [ADD],
        (Role.MAIN, ForkReason.COMPACTED),
    ),
    # the summary comes before the task; and it quotes two answers that followed equal results of a tool
    (MAIN, [S, says("user", f"So far: {LONG}"), U1], [ADD], (Role.MAIN, ForkReason.COMPACTED)),
    (
        [recorded([S, U1, SAME, A1], [ADD]), recorded([S, U1, SAME, A1, SAME, says("assistant", OWN)], [ADD])],
        [S, says("user", f"1. {LONG} 2. {OWN}")],
        [ADD],
        (Role.MAIN, ForkReason.COMPACTED),
    ),
    (
        [recorded([S, U1, A1], [ADD]), recorded([S, U2, says("assistant", OWN)], [ADD])],
        [S, says("user", f"1. {LONG} 2. {OWN}")],
        [ADD],
        (Role.MAIN, ForkReason.NEW_CONVERSATION),
    ),
    (MAIN, [S, says("user", "anew")], [ADD], (Role.MAIN, ForkReason.NEW_CONVERSATION)),
    (
        MAIN,
        [S, says("user", "e.g."), says("assistant", "an example"), U3],
        [ADD],
        (Role.MAIN, ForkReason.NEW_CONVERSATION),
    ),
    (MAIN, [OTHER, says("user", f"A title for: {LONG}")], None, (Role.SIDE, ForkReason.OTHER_AGENT)),
    (MAIN, [OTHER, says("user", "go")], [FIND], (Role.SUBAGENT, ForkReason.OTHER_AGENT)),
    (MAIN, [S, says("user", "go")], [FIND], (Role.SUBAGENT, ForkReason.OTHER_AGENT)),
    # a system prompt that tells the time is the same agent's
    (TIMED, [TEN_PAST, says("user", "anew")], [ADD], (Role.MAIN, ForkReason.NEW_CONVERSATION)),
    (TIMED, [TEN_PAST, says("user", f"Summary: {LONG}")], [ADD], (Role.MAIN, ForkReason.COMPACTED)),
    (TIMED, [TEN_PAST, says("user", "go")], [FIND], (Role.SUBAGENT, ForkReason.OTHER_AGENT)),
    (TIMED, [TEN_PAST, says("user", "go")], None, (Role.SUBAGENT, ForkReason.OTHER_AGENT)),
    (BARE, [OTHER, says("user", "go")], None, (Role.SUBAGENT, ForkReason.OTHER_AGENT)),
    (BARE, [OTHER, says("user", "go")], [ADD], (Role.MAIN, ForkReason.OTHER_AGENT)),  # the title came first
    ([*MAIN, SUB], [says("system", "search"), U3], [FIND], (Role.SUBAGENT, ForkReason.NEW_CONVERSATION)),
    (
        [*MAIN, SUB],
        [says("system", "search"), U1, says("assistant", "edited"), U3],
        [FIND],
        (Role.SUBAGENT, ForkReason.HISTORY_EDITED),
    ),
    ([recorded([U1, A1], role="side")], [U2], None, (Role.MAIN, ForkReason.NEW_CONVERSATION)),
    ([recorded([U1, A1]), recorded([U2, A1], role="side")], [U3], None, (Role.MAIN, ForkReason.NEW_CONVERSATION)),
    # no call was main yet: those before said of themselves that they are not
    ([recorded([OTHER, U1, A1], role="side")], [S, U1], None, (Role.MAIN, ForkReason.OTHER_AGENT)),
    ([SUB], [S, U1], [ADD], (Role.MAIN, ForkReason.OTHER_AGENT)),
    # fewer questions than were asked before the first answer: nothing that was sampled is in it
    ([recorded([S, U1, U2, A2], [ADD])], [S, U1], [ADD], (Role.MAIN, ForkReason.NEW_CONVERSATION)),
    # a check that repeats the agent's task goes on with nothing of its own either
    (
        [*MAIN, CHECK],
        [OTHER, U1, says("user", f"Is this right? {LONG}")],
        None,
        (Role.SIDE, ForkReason.NEW_CONVERSATION),
    ),
    # a check, once for each answer, quotes them; nothing of its own was compacted
    (
        [*MAIN, CHECK],
        [OTHER, says("user", f"Is this right? {LONG}")],
        None,
        (Role.SIDE, ForkReason.NEW_CONVERSATION),
    ),
    (
        [*BARE, recorded([OTHER, U3, A2], role="subagent")],
        [OTHER, says("user", f"Improve: {LONG}")],
        None,
        (Role.SUBAGENT, ForkReason.NEW_CONVERSATION),
    ),
    (
        [*MAIN, recorded([says("system", "search"), U1, A2, U2, says("assistant", OWN)], [FIND], role="subagent")],
        [says("system", "search"), says("user", f"So far: {OWN}")],
        [FIND],
        (Role.SUBAGENT, ForkReason.COMPACTED),
    ),
    # what another agent summed up for the main one
    (
        [*MAIN, recorded([OTHER, says("user", f"Sum up: {LONG}"), says("assistant", OWN)], role="side")],
        [S, says("user", f"So far: {OWN}")],
        [ADD],
        (Role.MAIN, ForkReason.COMPACTED),
    ),
    # what another agent found out for it
    (
        [*MAIN, recorded([OTHER, U3, says("assistant", OWN)], role="side")],
        [S, says("user", f"Known: {OWN}")],
        [ADD],
        (Role.MAIN, ForkReason.NEW_CONVERSATION),
    ),
]


@pytest.mark.parametrize(("history", "sent", "tools", "expected"), PLACES)
def test_a_call_gets_its_role_and_fork_reason(history, sent, tools, expected):
    place = judge(history, sent, tools)
    assert (place.role, place.reason) == expected


def test_every_rule_decides_a_case_of_the_table() -> None:
    deciding = [deciding_rule(Evidence(history, sent, tools, ())) for history, sent, tools, _ in PLACES]
    deciding += [deciding_rule(Evidence([], [S, U1], [ADD], under_way)) for under_way in ([], MAIN)]
    assert set(deciding) == set(RULES)


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        ([U4], None),  # another question at the same point
        ([U3], ForkReason.HISTORY_EDITED),  # the turn before it was dropped
        ([U2], None),  # the same once more
        ([says("user", f"You said: {A1['content']}")], None),  # that is still there
        ([says("user", "2"), A2, U3], ForkReason.HISTORY_EDITED),
        ([U2, says("assistant", "edited"), U3], ForkReason.HISTORY_EDITED),
        ([says("user", f"So far: {OWN}")], ForkReason.COMPACTED),
        ([U4, U4], None),
        ([U2, says("assistant", OWN), U4], ForkReason.HISTORY_EDITED),  # what stood between was dropped
        ([U2, U3], ForkReason.HISTORY_EDITED),  # the answer was dropped
        ([U2, A2, U3, says("assistant", OWN), U4], ForkReason.TRUNCATED),
        ([U2, A2, U3, says("assistant", OWN)], None),  # the same once more, its answer included
    ],
)
def test_a_branch_has_the_reason_that_it_extends_no_deeper_call(after, expected):
    below = [
        recorded([S, U1, A1, U2, A2], [ADD], id="2"),
        recorded([S, U1, A1, U2, A2, U3, says("assistant", OWN)], [ADD], id="3", finish="length"),
    ]
    beside = [recorded([S, U1, A1], [ADD]), recorded([S, U3, U4, A2], [ADD], id="4")]
    assert judge_branch([*beside, *below], [S, U1, A1, *after], 3, {"2", "3"}) == expected


@pytest.mark.parametrize(("finish", "expected"), [("stop", "template_rewrote"), ("length", "truncated")])
def test_a_branch_that_repeats_every_message_differs_in_its_tokens(finish, expected):
    deeper = recorded([S, U1, A1, U2, A2], [ADD], id="2", finish=finish)
    assert judge_branch([deeper], [S, U1, A1, U2, A2, U3], 3, {"2"}) == ForkReason(expected)


def test_a_branch_that_quotes_an_answer_behind_a_tools_result_is_compacted():
    worked = recorded([*WORKED[0].system, *WORKED[0].messages[:-1], says("assistant", OWN)], [ADD], id="2")
    sent = [*WORKED[0].system, *WORKED[0].messages[:2], says("user", f"So far: {OWN}")]
    assert judge_branch([worked], sent, 3, {"2"}) == ForkReason.COMPACTED
    assert judge_branch([worked], [*sent[:3], U4], 3, {"2"}) is None


def test_the_call_that_wrote_the_summary_is_named():
    first, summary = recorded([S, U1, A2], [ADD], id="1"), recorded([S, U1, A2, U2, A1], [ADD], id="2")
    place = judge([first, summary], [S, says("user", f"Summary: {LONG}")], [ADD])
    assert (place.reason, place.summary) == (ForkReason.COMPACTED, "2")
    edited = [S, U1, says("assistant", "edited"), says("user", f"Summary: {LONG}")]  # quoted, but not the reason
    place = judge([first, summary], edited, [ADD])
    assert (place.reason, place.summary) == (ForkReason.HISTORY_EDITED, None)
    place = judge(WORKED, [S, says("user", f"So far: {LONG}"), U1], [ADD])  # an answer, and no summary
    assert (place.reason, place.summary) == (ForkReason.COMPACTED, None)


@pytest.mark.parametrize(
    ("messages", "tools", "expected"),
    [
        ([S, U2], [ADD], (Role.MAIN, None)),  # another call of the same agent
        ([S, U1], [ADD], (Role.MAIN, None)),
        ([OTHER, U1], None, (Role.SIDE, ForkReason.OTHER_AGENT)),
        ([OTHER, U1], [FIND], (Role.SUBAGENT, ForkReason.OTHER_AGENT)),
    ],
)
def test_a_call_beside_a_running_first_call_gets_its_role(messages, tools, expected):
    place = judge([], messages, tools, [recorded([S, U1], [ADD])])
    assert (place.role, place.reason) == expected


WORDS = {1: "a", 2: "b", 3: "ab", 4: "c", 5: "Say it: ", 6: ".", 9: ""}
STOP = 9


def spelled(ids: Any) -> str:
    return "".join(WORDS[i] for i in ids)


def raw_call(output: list[int], role: str = "main") -> Tree:
    """A session with one call, whose prompt is token 5."""
    tree = Tree()
    tree.add(
        Node(
            id="raw",
            conversation_key=b"raw",
            parent=None,
            ids=TokenIds([5, *output]),
            n_delta=1,
            role=role,
            system_hash=None,
            tools_hash=None,
            messages=0,
        )
    )
    return tree


@pytest.mark.parametrize(
    ("tree", "prompt", "expected"),
    [
        (Tree(), [5], (Role.MAIN, None)),
        (raw_call([3, STOP], "side"), [4, 5], (Role.MAIN, ForkReason.NEW_CONVERSATION)),
        (raw_call([3, STOP], "side"), [5], (Role.SIDE, None)),  # the same prompt once more
        (raw_call([3, STOP], "side"), "Say it: ", (Role.SIDE, None)),
        (raw_call([3, STOP], "side"), [5, 4, 6], (Role.SIDE, ForkReason.HISTORY_EDITED)),
        (raw_call([3, STOP], "side"), "Say it: c.", (Role.SIDE, ForkReason.HISTORY_EDITED)),
        # an answer that was cut off comes back as other tokens of the same text
        (raw_call([3]), [5, 1, 2, 6], (Role.MAIN, ForkReason.TRUNCATED)),
        (raw_call([3]), [5, 1, 6], (Role.MAIN, ForkReason.HISTORY_EDITED)),
        (raw_call([3]), [5, 4, 1, 2], (Role.MAIN, ForkReason.HISTORY_EDITED)),
        (raw_call([3, STOP]), [5, 1, 2, 6], (Role.MAIN, ForkReason.HISTORY_EDITED)),  # it had ended
        (raw_call([]), [5, 6], (Role.MAIN, ForkReason.HISTORY_EDITED)),  # nothing was sampled
        (raw_call([1, 3]), "Say it: ac", (Role.MAIN, ForkReason.HISTORY_EDITED)),
    ],
)
def test_a_raw_prompt_gets_its_role_and_fork_reason(tree, prompt, expected):
    place = raw_place(tree, prompt, spelled, [STOP])
    assert (place.role, place.reason) == expected


def edits(draw: Any, talk: list[Any], start: int) -> tuple[list[Any], str]:
    """A conversation that begins as the recorded one up to `start`, with one change behind that, and what it was."""
    how = draw(st.sampled_from(["drop", "insert", "edit", "trim", "none"]))
    at = draw(st.integers(start, len(talk) - 1))
    sent = list(talk)
    if how == "drop":
        del sent[at]
    elif how == "insert":
        sent.insert(at, says("user", "new"))
    elif how == "edit":
        sent[at] = sent[at] | {"content": "edited"}
    elif how == "trim":
        sent = [*talk[:start], *talk[start + 2 * draw(st.integers(1, (len(talk) - start) // 2)) :]]
    return [*sent, says("user", "next")], how


@given(turns=st.integers(3, 6), start=st.integers(0, 2), data=st.data())
def test_a_changed_conversation_has_the_reason_of_its_change(turns, start, data):
    """Every answer and every question is another one, so a change can be told from each other."""
    talk = [S]
    for turn in range(turns):
        talk += [says("user", f"question {turn}"), says("assistant", f"answer {turn}")]
    covered = 1 + 2 * start
    sent, how = edits(data.draw, talk, covered)
    recorded_calls = [recorded(talk[: 1 + 2 * (turn + 1)], [ADD], id=str(turn)) for turn in range(turns)]
    below = {str(turn) for turn in range(start, turns)}
    branch = judge_branch(recorded_calls, sent, covered, below) if start else None
    found = branch if start else judge(recorded_calls, sent, [ADD]).reason
    if how == "none" or sent[: len(talk)] == talk:
        if start:  # the messages are those that were recorded; only the tokens can differ
            assert found == ForkReason.TEMPLATE_REWROTE
        return
    left = [message for message in sent[covered:] if message["role"] == "assistant"]
    if how == "trim":
        gone = turns - start - len(left)
        if start and not left:  # goes another way from there
            assert found is None
        elif not start and not left:
            assert found == ForkReason.NEW_CONVERSATION  # nothing of it is left
        else:
            assert found == (ForkReason.COMPACTED if gone > 1 or not start else ForkReason.HISTORY_EDITED)
    elif how == "drop" and not left:  # the only answer there was
        assert found in (None, ForkReason.HISTORY_EDITED)
    else:
        assert found == ForkReason.HISTORY_EDITED


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


@pytest.mark.parametrize("database_kind", KINDS)
@pytest.mark.parametrize("said", [None, "main"])
def test_a_title_that_comes_before_the_agent_is_no_turn_of_it(proxy, said):
    """Judged when the session has ended, wherever its role counts: trace, credit, audit."""
    sessions = proxy.post("/groups").json()["sessions"]
    session = sessions[0]
    headers = {} if said is None else {"X-Turn-Type": said}
    ask(proxy, session, [OTHER, U1], extra_headers=headers)
    ask(proxy, session, [U2])  # a probe
    [a1] = ask(proxy, session, [S, U1], [ADD])
    ask(proxy, session, [S, U1, a1, U2], [ADD])
    assert [role for role, *_ in forks(proxy, session)] == ["main", "subagent", "main", "main"]
    finish(proxy, sessions)
    title, probe, *agent = proxy.calls(session)
    assert [call["role"] for call in (title, probe, *agent)] == [said or "side", "side", "main", "main"]
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
