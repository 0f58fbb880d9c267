"""The cause of a fork in words, for the forks that no recorded conversation of these tests has."""

from __future__ import annotations

from typing import Any

import pytest

from agentrl.diagnosis.advice import advise
from agentrl.diagnosis.forks import Fork, MessageDivergence, TokenDivergence
from agentrl.domain.schemas import ForkReason
from agentrl.rendering.divergence import Change

from .written_calls import call

SYSTEM, OTHER_SYSTEM = {"role": "system", "content": "be brief"}, {"role": "system", "content": "be long"}
USER, OTHER_USER = {"role": "user", "content": "one"}, {"role": "user", "content": "two"}
RAW = [{"role": "raw", "content": "x"}, {"role": "assistant", "content": "y"}]


def fork(reason: ForkReason | None, **facts: Any) -> Fork:
    usual: dict[str, Any] = {"call": call(2), "seen": None, "tokens": None, "messages": None, "cost_tokens": 0}
    return Fork(reason=reason, **usual | facts)


def differs(before: Any, now: Any, index: int = 0, how: Change | None = "edited") -> MessageDivergence:
    return MessageDivergence(other=call(), index=index, before=before, now=now, how=how)


@pytest.mark.parametrize("reason", [None, *ForkReason])
def test_every_reason_has_a_cause_and_an_advice_without_gaps(reason: ForkReason | None) -> None:
    found = advise(fork(reason))
    assert found.cause
    assert found.todo.endswith(".")
    assert "{" not in found.cause + found.todo
    assert "None" not in found.cause


@pytest.mark.parametrize(
    ("reason", "seen", "doubted"),
    [
        (ForkReason.HISTORY_EDITED, ForkReason.COMPACTED, True),
        (ForkReason.ARGUMENTS_CHANGED, ForkReason.HISTORY_EDITED, True),
        (ForkReason.TEXT_DROPPED, ForkReason.TEXT_DROPPED, False),
        (ForkReason.CALL_IDS_CHANGED, None, False),
        (ForkReason.TEMPLATE_REWROTE, ForkReason.HISTORY_EDITED, False),
        (None, ForkReason.HISTORY_EDITED, False),
    ],
)
def test_a_reason_that_the_messages_do_not_show_is_doubted(
    reason: ForkReason | None, seen: ForkReason | None, doubted: bool
) -> None:
    edited = differs(USER, OTHER_USER)
    found = advise(fork(reason, seen=seen, messages=edited))
    assert ("(by the messages alone: " in found.cause) is doubted
    assert found.certain is not doubted
    if doubted:
        assert f"(by the messages alone: {str(seen).replace('_', ' ')})" in found.cause


def test_a_branch_names_the_call_that_was_continued_twice() -> None:
    assert "continued call 1 a second time" in advise(fork(None, call=call(2, call()))).cause
    assert "another conversation began before an earlier call was answered" in advise(fork(None)).cause


@pytest.mark.parametrize("seen", [ForkReason.COMPACTED, ForkReason.HISTORY_EDITED])
def test_a_compaction_is_certain_where_the_messages_show_it(seen: ForkReason) -> None:
    found = advise(fork(ForkReason.COMPACTED, seen=seen, messages=differs(USER, OTHER_USER, 3)))
    assert "left out or replaced by a summary, from message 4 on: “one” became “two”" in found.cause
    assert found.certain is (seen is ForkReason.COMPACTED)


def test_a_raw_prompt_that_begins_anew_is_certain_and_a_conversation_is_not() -> None:
    raw = advise(fork(ForkReason.NEW_CONVERSATION, call=call(2, turns=RAW)))
    assert raw.certain
    assert raw.cause.startswith("a raw prompt does not begin with an earlier prompt")
    assert not advise(fork(ForkReason.NEW_CONVERSATION)).certain


def test_a_raw_prompt_that_differs_from_an_answer_names_the_call_where_it_can() -> None:
    raw = call(2, turns=RAW, delta_ids=[1, 2, 9])
    other = call(1, delta_ids=[1, 2], output_ids=[3, 4])
    at = {"theirs": 3, "ours": 9}
    told = advise(fork(ForkReason.HISTORY_EDITED, call=raw, tokens=TokenDivergence(other=other, position=2, **at)))
    assert told.cause == "a raw prompt begins with the prompt of call 1, and then differs from its answer"
    ended = advise(fork(ForkReason.HISTORY_EDITED, call=raw, tokens=TokenDivergence(other=other, position=3, **at)))
    assert ended.cause == "a raw prompt continues call 1 without the token that ended its answer"
    assert "an earlier call" in advise(fork(ForkReason.HISTORY_EDITED, call=raw)).cause


@pytest.mark.parametrize(
    ("found", "cause", "todo"),
    [
        (None, "the history is not the one that was recorded", "Only append"),
        (differs(USER, None, how=None), "the history is not the one that was recorded", "Only append"),
        (differs(USER, SYSTEM), "the client added a system message at message 1", "Send the same system prompt"),
        (differs(SYSTEM, USER), "the client left out the system message that was message 1", "Send the same system"),
        (
            differs(SYSTEM, OTHER_SYSTEM),
            "the client edited message 1 (system): it is not what was sent: “be brief” became “be long”",
            "Keep what changes",
        ),
        (
            differs(USER | {"role": "assistant"}, OTHER_USER | {"role": "assistant"}, 2),
            "the client edited message 3 (assistant): it is not what was sampled: “one” became “two”",
            "Send answers back unchanged",
        ),
        (
            differs(None, OTHER_USER, how=None),
            "the client edited message 1 (user): it is not what was sent",
            "Only append",
        ),
        (differs(USER, OTHER_USER, how="dropped"), "the client dropped message 1 (user): “one”", "Keep every message"),
        (differs(USER, OTHER_USER, how="moved"), "the client moved message 1 (user): “one”", "Keep every message"),
        (
            differs(USER, OTHER_USER, how="inserted"),
            "the client inserted a new message at message 1 (user): “two”",
            "Keep every message",
        ),
    ],
)
def test_an_edited_history_says_what_the_client_did(found: MessageDivergence | None, cause: str, todo: str) -> None:
    advised = advise(fork(ForkReason.HISTORY_EDITED, messages=found))
    assert advised.cause == cause
    assert advised.todo.startswith(todo)
    assert advised.certain is (found is not None and found.now is not None)
