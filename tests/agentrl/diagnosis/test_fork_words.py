"""What a message said before and says now, quoted on one line."""

from __future__ import annotations

from typing import Any

import pytest

from agentrl.diagnosis.fork_words import QUOTE_CHARS, change, changed_tools, quote, words
from agentrl.diagnosis.forks import Fork, MessageDivergence, TokenDivergence
from agentrl.diagnosis.words import SHOWN, count, some

from .written_calls import call

LONG = "x" * QUOTE_CHARS


def became(before: str | None, now: str | None) -> str:
    """How a change of a user's message is quoted."""
    messages = [None if text is None else {"role": "user", "content": text} for text in (before, now)]
    return change(MessageDivergence(other=call(), index=0, before=messages[0], now=messages[1], how="edited"))


@pytest.mark.parametrize(
    ("before", "now", "quoted"),
    [
        ("one", "two", ": “one” became “two”"),
        ("one", "one", ""),
        ("one", None, ""),
        (None, "one", ""),
        (f"{LONG} one", f"{LONG} two", f": “…{'x' * 11} one” became “…{'x' * 11} two”"),
        (LONG, f"{LONG} more", f": “…{'x' * 12}” became “…{'x' * 12} more”"),
        (f"{LONG} more", LONG, f": “…{'x' * 12} more” became “…{'x' * 12}”"),
        ("a", LONG + "x", f": “a” became “{LONG}…”"),
        ("", "one", ": “” became “one”"),
    ],
)
def test_a_change_is_quoted_where_it_begins(before: str | None, now: str | None, quoted: str) -> None:
    assert became(before, now) == quoted


def test_nothing_is_quoted_without_a_message() -> None:
    assert change(None) == ""


@pytest.mark.parametrize(
    ("text", "start", "quoted"), [("abc", 0, "“abc”"), ("abc", 1, "“…bc”"), (LONG + "y", 0, f"“{LONG}…”")]
)
def test_a_quotation_says_where_it_leaves_something_out(text: str, start: int, quoted: str) -> None:
    assert quote(text, start) == quoted


def test_a_message_is_one_visible_line() -> None:
    tool_call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    assert words({"role": "assistant", "content": None, "tool_calls": [tool_call]}) == 'add({"a": 1})'
    assert words({"role": "assistant", "content": "so", "tool_calls": [tool_call]}) == 'so add({"a": 1})'
    parts = [{"type": "text", "text": "see"}, {"type": "image_url"}, {"type": "text", "text": "this"}]
    assert words({"role": "user", "content": parts}) == "see  this"
    assert "\x1b" not in words({"role": "user", "content": "\x1b[31mred"})


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        (["a"], ["a", "c", "b"], ": with b, c"),
        (["a", "b"], ["b"], ": without a"),
        (["a"], ["b"], ": with b, without a"),
        (["a"], ["a"], ""),
        (None, ["a"], ": with a"),
    ],
)
def test_tools_that_came_and_went_are_listed(before: list[str] | None, now: list[str], said: str) -> None:
    other = call(tools=None if before is None else [tool(name) for name in before])
    ours = call(tools=[tool(name) for name in now])
    tokens = TokenDivergence(other=other, position=0, theirs=None, ours=None)
    fork = Fork(call=ours, reason=None, seen=None, tokens=tokens, messages=None, cost_tokens=0)
    assert changed_tools(fork) == said


def test_a_long_list_ends_with_its_length() -> None:
    assert some(range(SHOWN)) == "0, 1, 2, 3, 4"
    assert some(range(1234)) == "0, 1, 2, 3, 4, … (1,234 in all)"
    assert (count(1, "call"), count(0, "call"), count(1000, "call")) == ("1 call", "0 calls", "1,000 calls")
