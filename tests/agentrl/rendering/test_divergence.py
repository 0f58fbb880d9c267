"""Where a conversation departs from a recorded one, and why."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.domain.schemas import ForkReason
from agentrl.rendering.divergence import (
    PlainMessages,
    change,
    common,
    compare,
    fingerprint,
    leading_system,
    nearest,
    plain,
    quoting,
)


def says(role, content, **more):
    return {"role": role, "content": content, **more}


def calls(arguments, id="call_1", content=None):
    function = {"name": "add", "arguments": json.dumps(arguments)}
    return says("assistant", content, tool_calls=[{"id": id, "type": "function", "function": function}])


def result(content, id="call_1"):
    return says("tool", content, tool_call_id=id)


SYSTEM, U1, A1, U2, A2, U3 = (
    says("system", "be brief"),
    says("user", "one"),
    says("assistant", "first"),
    says("user", "two"),
    says("assistant", "second"),
    says("user", "three"),
)
A3 = says("assistant", "third")
TALK = [SYSTEM, U1, A1, U2, A2]
LONGER = [*TALK, U3, A3]
WORK = [SYSTEM, U1, calls({"a": 1}), result("2"), A2]
SPOKEN = [SYSTEM, U1, calls({"a": 1}, content="I add."), result("2"), A2]


@pytest.mark.parametrize(
    ("recorded", "sent", "expected"),
    [
        (TALK, [*TALK, U3], None),
        (TALK, TALK, None),
        (TALK, TALK[:2], None),
        (TALK, [SYSTEM, says("user", "other"), A1, U2, A2, U3], (1, ForkReason.HISTORY_EDITED)),
        (TALK, [SYSTEM, U1, says("assistant", "First."), U2, A2, U3], (2, ForkReason.HISTORY_EDITED)),
        (TALK, [says("system", "at 10:02"), U1, A1, U2, A2, U3], (0, ForkReason.HISTORY_EDITED)),
        (TALK, [SYSTEM, U1, U3, A1, U2, A2, U3], (2, ForkReason.HISTORY_EDITED)),  # a message put in between
        (WORK, [SYSTEM, U1, calls({"a": 2}), result("2"), A2, U3], (2, ForkReason.ARGUMENTS_CHANGED)),
        (WORK, [SYSTEM, U1, calls({"a": 1}, content="so"), result("2"), A2], (2, ForkReason.HISTORY_EDITED)),
        (WORK, [SYSTEM, U1, calls({"a": 1}, "x"), result("2", "x"), A2, U3], (2, ForkReason.CALL_IDS_CHANGED)),
        (WORK, [SYSTEM, U1, calls({"a": 2}, "x"), result("2", "x"), A2, U3], (2, ForkReason.ARGUMENTS_CHANGED)),
        (WORK, [SYSTEM, U1, calls({"a": 1}), result("2", "x"), A2, U3], (3, ForkReason.CALL_IDS_CHANGED)),
        (WORK, [SYSTEM, U1, calls({"a": 1}), result("cleared"), A2, U3], (3, ForkReason.HISTORY_EDITED)),
        (TALK, [SYSTEM, U2, A2, U3], (1, ForkReason.COMPACTED)),  # a sliding window
        (TALK, [SYSTEM, says("user", "so far: …"), A2, U3], (1, ForkReason.COMPACTED)),
        (TALK, [SYSTEM, U1, U3], (2, ForkReason.COMPACTED)),  # the answer was left out
        (TALK, [U1, A1, U2, A2, U3], (0, ForkReason.HISTORY_EDITED)),  # the system prompt was left out
        (TALK, [SYSTEM, says("system", "it is late"), U1, A1, U2, A2, U3], (1, ForkReason.HISTORY_EDITED)),
        (TALK, [SYSTEM, says("system", "so far: …"), U2, A2, U3], (1, ForkReason.COMPACTED)),
        (TALK, [SYSTEM, U3], (1, ForkReason.HISTORY_EDITED)),  # nothing of it is left
        (TALK, [SYSTEM, U1, U2, A2, U3], (2, ForkReason.HISTORY_EDITED)),  # one answer was left out, and nothing else
        (
            LONGER,
            [SYSTEM, U1, says("assistant", "1st"), U2, says("assistant", "2nd"), U3, A3],
            (2, ForkReason.HISTORY_EDITED),
        ),  # two answers were rewritten in their places
        (
            [*LONGER, says("user", "four"), says("assistant", "fourth")],
            [*TALK[:3], says("user", "four"), says("assistant", "fourth")],
            (3, ForkReason.COMPACTED),
        ),  # two answers were left out behind one that stays
        (LONGER, [SYSTEM, U3, A3, U1, A1, U2, A2], (1, ForkReason.HISTORY_EDITED)),  # moved, and nothing left out
        (SPOKEN, [SYSTEM, U1, calls({"a": 1}), result("2"), A2, U3], (2, ForkReason.TEXT_DROPPED)),
        (SPOKEN, [SYSTEM, U1, calls({"a": 1}, "x"), result("2", "x"), A2], (2, ForkReason.TEXT_DROPPED)),
        (SPOKEN, [SYSTEM, U1, calls({"a": 2}), result("2"), A2, U3], (2, ForkReason.HISTORY_EDITED)),
        (SPOKEN, [SYSTEM, U1, says("assistant", "I add."), U3], (2, ForkReason.HISTORY_EDITED)),  # the call was dropped
        (WORK, [SYSTEM, U1, says("assistant", None), U3], (2, ForkReason.HISTORY_EDITED)),
        (TALK, [SYSTEM, U1, says("assistant", ""), U2, A2, U3], (2, ForkReason.HISTORY_EDITED)),
        (TALK, [SYSTEM, U1 | {"name": "ann"}, A1, U2, A2, U3], (1, ForkReason.HISTORY_EDITED)),  # another speaker
    ],
)
def test_a_divergence_has_an_index_and_a_reason(recorded, sent, expected):
    found = compare(plain(recorded), plain(sent))
    assert (found and (found.index, found.reason)) == expected


@pytest.mark.parametrize(
    ("recorded", "sent", "expected"),
    [
        (TALK, [SYSTEM, U3, A1, U2, A2], "edited"),
        (TALK, [SYSTEM, A1, U2, A2, U3], "dropped"),
        (TALK, [SYSTEM, U3, U1, A1, U2], "inserted"),
        (TALK, [SYSTEM, A1, U1, U2, A2], "moved"),
        (WORK, [SYSTEM, U1, result("2", "x"), A2], "dropped"),  # ids do not count
        (WORK, [SYSTEM, U1, U3, calls({"a": 1}, "x"), result("2", "x")], "inserted"),
        ([U1, calls({"a": 1, "b": 2})], [U1, U3, calls({"b": 2, "a": 1})], "inserted"),  # nor does the arguments' order
        # what stands before the difference does not count
        ([U1, A1, U1, A2], [U1, A1, U2, A2], "edited"),
        ([U1, A1, U2, A2], [U1, A1, U1, A2], "edited"),
    ],
)
def test_the_first_different_message_is_edited_dropped_inserted_or_moved(recorded, sent, expected):
    recorded, sent = plain(recorded), plain(sent)
    assert change(recorded, sent, common(recorded, sent)) == expected


def test_the_nearest_history_shares_most_messages_then_answers_then_is_newest():
    histories = [plain(h) for h in ([SYSTEM, U3, A1], TALK, [SYSTEM, U3, A2], [SYSTEM, U3, A2])]
    assert nearest(histories, plain([SYSTEM, U1, U3])) == 1
    assert nearest(histories, plain([SYSTEM, says("user", "x"), A1, U2, A2])) == 1
    assert nearest(histories, plain([SYSTEM, U3, says("assistant", "edited")])) == 3


def test_a_summary_quotes_an_answer_that_is_long_enough():
    long = "The user wants to add numbers."
    answers = plain([says("assistant", "ok"), says("assistant", long)])
    summary = [says("user", "ok then"), says("tool", long), says("user", f"So far:\n{long}\nGo on.")]
    assert quoting(answers, plain(summary)) == 2
    assert quoting(answers, plain(summary[:2])) is None


def test_an_answer_is_quoted_from_20_characters_on_by_a_user_or_in_the_system_prompt():
    exactly, shorter = says("assistant", "The sum is 1 plus 2."), says("assistant", "The sum is 1 plus 2")
    assert quoting(plain([exactly]), plain([says("user", "It says: The sum is 1 plus 2.")])) == 0
    assert quoting(plain([shorter]), plain([says("user", "It says: The sum is 1 plus 2")])) is None
    assert quoting(plain([exactly]), plain([U1, says("system", "So far: The sum is 1 plus 2.")])) == 1
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    parts = [image, {"type": "text", "text": "So far:"}, {"type": "text", "text": "The sum is 1 plus 2."}]
    assert quoting(plain([exactly]), plain([says("user", parts)])) == 0


def test_a_fingerprint_leaves_out_words_with_digits():
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    parts = [{"type": "text", "text": "Be"}, image, {"type": "text", "text": "brief. It is 10:02."}]
    assert fingerprint(plain([says("system", "Be  brief.\nIt is 10:02."), says("system", "")])) == [
        "Be brief. It is",
        "",
    ]
    assert fingerprint(plain([says("system", parts)])) == ["Be brief. It is"]


def test_shared_messages_are_canonicalized_once():
    known = PlainMessages()
    one, other = known.of([U1, A1]), known.of([U1, A2])
    assert one[0] is other[0]
    assert (one, other) == (plain([U1, A1]), plain([U1, A2]))


def test_developer_messages_count_as_leading_system_messages():
    assert leading_system([says("developer", "a"), SYSTEM, U1, SYSTEM]) == 2
    assert leading_system([SYSTEM]) == 1


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        ("It is 10:02.", "It is 10:03.", True),
        ("Be brief. Today is Monday, November 30, 2026.", "Be brief. Today is Tuesday, December 1, 2026.", True),
        ("You have 3 tries in /tmp/run-81f0.", "You have 2 tries in /tmp/run-9c.", True),
        ("Be  brief.\n", "Be brief.", True),
        ("Be brief.", "Write a title.", False),
        ("Plan. It is 10:02.", "Search. It is 10:02.", False),
    ],
)
def test_fingerprints_are_equal_when_only_dates_and_numbers_differ(one, other, alike):
    prints = [fingerprint(plain([says("system", text)])) for text in (one, other)]
    assert (prints[0] == prints[1]) is alike


messages = st.lists(
    st.one_of(
        st.builds(says, st.sampled_from(["user", "assistant"]), st.sampled_from("abc")),
        st.builds(calls, st.fixed_dictionaries({"a": st.integers(0, 2)}), st.sampled_from(["i", "j"])),
        st.builds(result, st.sampled_from("ab"), st.sampled_from(["i", "j"])),
    ),
    max_size=7,
)


@given(messages, messages)
def test_conversations_diverge_exactly_where_they_first_differ(one, other):
    one, other = plain(one), plain(other)
    at, found = common(one, other), compare(one, other)
    assert one[:at] == other[:at]
    assert (found is None) == (at in (len(one), len(other)))
    if found is not None:
        assert found.index == at
        assert one[at] != other[at]
