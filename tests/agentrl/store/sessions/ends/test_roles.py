"""Roles of calls without tools beside an agent with tools, in any order of the conversations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.domain.schemas import Json, Role
from agentrl.rendering.divergence import mark
from agentrl.store.calls import conversations
from agentrl.store.calls.conversations import Conversation
from agentrl.store.sessions.ends import roles
from agentrl.store.sessions.ends.roles import Turn, side_calls

AGENT = Turn(id="agent", role="main", fresh=True, alone=False, tools=True, agent="solve", said=False)
ON = replace(AGENT, id="on", fresh=False, alone=True)
TITLE = Turn(id="title", role="main", fresh=True, alone=True, tools=False, agent="title", said=False)


@pytest.mark.parametrize(
    ("turns", "expected"),
    [
        ([TITLE, AGENT, ON], {"title"}),
        ([AGENT, ON, TITLE], {"title"}),  # two replicas began both at once
        ([TITLE, replace(TITLE, id="again"), AGENT], {"title", "again"}),
        ([TITLE, replace(TITLE, id="probe", agent="", role="subagent"), AGENT], {"title", "probe"}),
        ([TITLE], set()),  # an agent without tools
        ([TITLE, replace(AGENT, role="subagent")], set()),
        ([replace(TITLE, agent="solve"), AGENT], set()),  # the agent itself, which plans without tools
        ([replace(TITLE, alone=False), replace(TITLE, id="more", fresh=False), AGENT], set()),  # it goes on
        ([TITLE, replace(TITLE, id="edited", fresh=False), AGENT], set()),  # goes on another way
        ([replace(TITLE, said=True), AGENT], set()),
        ([replace(TITLE, role="side"), AGENT], set()),
    ],
)
def test_calls_that_become_side_calls(turns, expected):
    assert side_calls(turns) == expected


turn = st.builds(
    Turn,
    id=st.uuids().map(str),
    role=st.sampled_from(["main", "subagent", "side"]),
    fresh=st.booleans(),
    alone=st.booleans(),
    tools=st.booleans(),
    agent=st.sampled_from("abc"),
    said=st.booleans(),
)


@given(st.lists(turn, max_size=8), st.randoms())
def test_side_calls_do_not_depend_on_the_order_and_are_found_at_once(turns, random):
    found = side_calls(turns)
    shuffled = random.sample(turns, len(turns))
    assert side_calls(shuffled) == found
    after = [replace(one, role=Role.SIDE) if one.id in found else one for one in turns]
    assert side_calls(after) == set()
    for one in turns:
        if one.id in found:
            assert (one.tools, one.said) == (False, False)
            assert one.role != Role.SIDE
            assert any(other.tools and other.role == Role.MAIN for other in turns)


def test_a_message_that_calls_share_is_read_once(monkeypatch):
    """A long session's calls hold each other's messages: reading those of every call is quadratic, within a commit."""
    messages = [{"role": "user" if i % 2 == 0 else "assistant", "content": str(i)} for i in range(40)]
    title = [{"role": "user", "content": "title"}, {"role": "assistant", "content": "A title"}]
    ends = {"title": title} | {str(i): messages[:i] for i in range(2, 41, 2)}
    talks = {
        call_id: Conversation(call_id=call_id, role="main", system=[], messages=said, tools=None, options={})
        for call_id, said in ends.items()
    }
    marked: list[str] = []
    monkeypatch.setattr(conversations, "of_session", lambda conn, session_id: talks)

    def noted(message: Json) -> str:
        marked.append(message["content"])
        return mark(message)

    monkeypatch.setattr(roles, "mark", noted)
    assert roles._handed_over(cast(Any, None), "s", {"title", "2"}) == {"2"}
    assert sorted(marked) == sorted(message["content"] for message in messages + title)
