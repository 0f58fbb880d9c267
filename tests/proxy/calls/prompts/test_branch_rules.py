"""Reasons of calls that extend an earlier call than the last, and of calls with one change in the conversation."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.domain.schemas import ForkReason
from agentrl.proxy.calls.prompts.fork_rules import judge, judge_branch

from .recorded_talks import A1, A2, ADD, OWN, U1, U2, U3, U4, WORKED, S, recorded, says


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
