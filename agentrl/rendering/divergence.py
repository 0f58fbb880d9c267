"""Finds where a conversation diverges from a recorded one: pure functions over canonical messages.

recorded   system  user  answer  user    answer
sent       system  user  answer  user'   …
                                 └── index of the divergence, and its cause
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from agentrl.domain.schemas import ForkReason, Json
from agentrl.rendering.conversation import canonical
from agentrl.rendering.messages import role_of

QUOTE_CHARS = 20
"""Shorter answers are ignored, since other messages may contain them by chance."""
_TELLS_TIME = re.compile(
    r".*\d.*|(mon|tue|wed|thu|fri|sat|sun)|(mon|tues|wednes|thurs|fri|satur|sun)day|[ap]\.?m"
    r"|jan(uary)?|feb(ruary)?|mar(ch)?|apr(il)?|may|june?|july?|aug(ust)?|sept?(ember)?|oct(ober)?|nov(ember)?"
    r"|dec(ember)?",
    re.IGNORECASE,
)


Change = Literal["edited", "dropped", "moved", "inserted"]


@dataclass(frozen=True, slots=True)
class Divergence:
    """A divergence. `index` is the position in the later conversation, from 0."""

    index: int
    reason: ForkReason


def plain(messages: Iterable[Json]) -> list[Json]:
    """Canonical messages."""
    return [canonical(message) for message in messages]


class PlainMessages:
    """Canonical messages of conversations that share messages: each message is converted once."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Json, Json]] = {}  # by identity: the message, kept alive, and its plain form

    def of(self, messages: Iterable[Json]) -> list[Json]:
        """Canonical messages."""
        return [self._one(message) for message in messages]

    def _one(self, message: Json) -> Json:
        if id(message) not in self._known:
            self._known[id(message)] = message, canonical(message)
        return self._known[id(message)][1]


def leading_system(messages: Sequence[Json]) -> int:
    """The number of leading system messages."""
    return next((i for i, m in enumerate(messages) if role_of(m) != "system"), len(messages))


def fingerprint(system: Sequence[Json]) -> list[str]:
    """An agent's fingerprint: its system messages without words that have digits or name days and months."""
    texts = (_text(message).split() for message in system)
    return [" ".join(word for word in words if not _TELLS_TIME.fullmatch(word.strip(".,;:!?()"))) for words in texts]


def common(one: Sequence[Json], other: Sequence[Json]) -> int:
    """Length of the common prefix of two canonical conversations."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def nearest(recorded: Sequence[Sequence[Json]], sent: Sequence[Json]) -> int:
    """The index of the recorded conversation from which `sent` stems: most common messages, then most answers, then
    latest.

    `recorded` must not be empty.
    """
    sent_answers = {mark(message) for message in sent if message["role"] == "assistant"}
    marks: dict[int, str] = {}  # by identity: recorded conversations share messages

    def answers(messages: Sequence[Json]) -> set[str]:
        found = [message for message in messages if message["role"] == "assistant"] if sent_answers else []
        for message in found:
            if id(message) not in marks:
                marks[id(message)] = mark(message)
        return {marks[id(message)] for message in found}

    def rank(index: int) -> tuple[int, int, int]:
        return common(recorded[index], sent), len(answers(recorded[index]) & sent_answers), index

    return max(range(len(recorded)), key=rank)


def compare(recorded: Sequence[Json], sent: Sequence[Json]) -> Divergence | None:
    """The divergence of `sent` from `recorded`; None when `sent` continues or repeats `recorded`.

    COMPACTED means that several answers, the first turn, or all of several turns were left out. A single dropped, moved
    or inserted message is an edit (`change`).
    """
    at = common(recorded, sent)
    if at in (len(recorded), len(sent)):
        return None
    if _left_out(recorded, sent, at):
        return Divergence(at, ForkReason.COMPACTED)
    return Divergence(at, _cause(recorded[at], sent[at]))


def change(recorded: Sequence[Json], sent: Sequence[Json], at: int) -> Change:
    """How the first different message, at index `at`, changed."""
    stays = mark(recorded[at]) in map(mark, sent[at:])
    known = mark(sent[at]) in map(mark, recorded[at:])
    if stays:
        return "moved" if known else "inserted"
    return "dropped" if known else "edited"


def textless(message: Json) -> Json:
    """A message without its text."""
    return {name: value for name, value in message.items() if name != "content"}


def without_ids(message: Json) -> Json:
    """A canonical message without the ids of tool calls."""
    bare = {name: value for name, value in message.items() if name != "tool_call_id"}
    if "tool_calls" in bare:
        calls = bare["tool_calls"]
        bare["tool_calls"] = [{name: value for name, value in call.items() if name != "id"} for call in calls]
    return bare


def quoting(answers: Iterable[Json], messages: Sequence[Json]) -> int | None:
    """The index of the first message that quotes one of the answers, as a summary does; None without one."""
    texts = {text for answer in answers if len(text := _text(answer).strip()) >= QUOTE_CHARS}
    for index, message in enumerate(messages):
        if message["role"] in ("user", "system") and any(text in _text(message) for text in texts):
            return index
    return None


def mark(message: Json) -> str:
    """A key that is equal for messages that differ only in ids."""
    return json.dumps(without_ids(message), sort_keys=True)


def _text(message: Json) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else " ".join(part.get("text", "") for part in content)


def _left_out(recorded: Sequence[Json], sent: Sequence[Json], at: int) -> bool:
    """Whether turns of `recorded` were left out from message `at` on (see `compare`)."""
    before, now = _answers(recorded, at), _answers(sent, at)
    if not now:
        return len(before) > 1 and at > leading_system(sent)
    first = not any(message["role"] == "assistant" for message in recorded[:at])
    kept = {answer for _, answer in now}
    places: dict[str, tuple[int, int, int]] = {}  # answer → its index, its rank, how many earlier answers are gone
    gone = 0
    for rank, (index, answer) in enumerate(before):
        places.setdefault(answer, (index, rank, gone))
        gone += answer not in kept
    shift = leading_system(recorded) - leading_system(sent)
    for rank_now, (index_now, answer) in enumerate(now):
        index, rank, gone = places.get(answer, (0, 0, 0))
        left_out = min(rank - rank_now, gone)
        if left_out > 1 or (left_out == 1 and first and index - index_now - shift > 1):
            return True
    return False


def _answers(messages: Sequence[Json], start: int) -> list[tuple[int, str]]:
    """Index and key of each answer from message `start` on."""
    behind = enumerate(messages[start:], start)
    return [(index, mark(message)) for index, message in behind if message["role"] == "assistant"]


def _cause(before: Json, now: Json) -> ForkReason:
    """The reason for the change of one message."""
    same = before["role"] == now["role"] and before.get("content") == now.get("content")
    if same and now["role"] == "tool":
        return ForkReason.CALL_IDS_CHANGED
    calls, calls_now = before.get("tool_calls", []), now.get("tool_calls", [])
    if same and calls and [call["name"] for call in calls] == [call["name"] for call in calls_now]:
        bare = without_ids(before) == without_ids(now)
        return ForkReason.CALL_IDS_CHANGED if bare else ForkReason.ARGUMENTS_CHANGED
    if calls and before.get("content") and mark(textless(before)) == mark(now):
        return ForkReason.TEXT_DROPPED
    return ForkReason.HISTORY_EDITED
