"""Roles and reasons of calls that extend nothing, as pure rules."""

from __future__ import annotations

from typing import Any

import pytest

from agentrl.domain.schemas import ForkReason, Role
from agentrl.domain.tokens import TokenIds
from agentrl.proxy.calls.prompts.fork_evidence import Evidence
from agentrl.proxy.calls.prompts.fork_rules import RULES, deciding_rule, judge, raw_place
from agentrl.proxy.calls.token_tree import Tree
from agentrl.store.calls.call_tree import Node

from .recorded_talks import A1, A2, ADD, FIND, LONG, MAIN, OTHER, OWN, U1, U2, U3, U4, WORKED, S, recorded, says

BARE = [recorded([S, U1, A1]), recorded([S, U1, A1, U2, A2])]
SUMMED = [recorded([S, U1, A2], [ADD]), recorded([S, U1, A2, U2, A1], [ADD])]  # A1 is asked for behind A2
TIMED = [recorded([says("system", "Be brief. It is Mon 10:02."), U1, A2, U2, A1], [ADD])]
TEN_PAST = says("system", "Be brief. It is Tue 10:10.")
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
