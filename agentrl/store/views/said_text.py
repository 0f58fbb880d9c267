"""Looks for a phrase and for tool calls in what sessions' calls said: prompts, answers, reasoning, tool arguments."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson
from sqlalchemy import Connection, select

from agentrl.domain.schemas import Json
from agentrl.store.db import codec
from agentrl.store.tables import contents, interaction_data, interactions

AROUND = 80
"""Characters of a snippet on each side of the phrase."""
AT_ONCE = 32
"""Calls that are fetched at once."""
NOT_SAID = frozenset({"role", "type", "id", "tool_call_id"})
"""Fields of a message that are not its text."""


@dataclass(frozen=True)
class Phrase:
    """A text to look for, in upper or lower case."""

    text: str
    _raw: str = field(init=False)
    _pattern: re.Pattern[str] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_raw", orjson.dumps(self.text)[1:-1].decode().lower())
        object.__setattr__(self, "_pattern", re.compile(re.escape(self.text), re.IGNORECASE))

    def may_be_in(self, raw: str) -> bool:
        """Whether JSON may hold the phrase: fast, and True also for keys and for the fields of NOT_SAID."""
        return self._raw in raw.lower()

    def snippet(self, value: Any) -> Json | None:
        """The text around the first place of the phrase in a message or in a list of messages."""
        for role, text in _texts(value):
            if (found := self._pattern.search(text)) is not None:
                start, end = found.span()
                lead, rest = text[max(0, start - AROUND) : start], text[end : end + AROUND]
                lead, rest = ("…" if start > AROUND else "") + lead, rest + ("…" if len(text) > end + AROUND else "")
                return {"role": role, "lead": lead, "found": found[0], "rest": rest}
        return None


def calls_with(
    conn: Connection, session_ids: Sequence[str], phrase: Phrase | None, tool: str | None, *, most: int, deadline: float
) -> tuple[dict[str, Json], str | None]:
    """At most `most` of these sessions, newest first, whose calls hold the phrase and call the tool, with a snippet.

    Also returns the id of the last session that was looked at, if the deadline or `most` came before the end; None
    otherwise. One session is looked at in any case: of a very long one, as much as the time allows.
    """
    hits: dict[str, Json] = {}
    if not session_ids:
        return hits, None
    c, d = interactions.c, interaction_data.c
    rows = conn.execute(
        select(c.session_id, c.id, c.system_hash, d.new_messages, d.answer)
        .join(interaction_data, d.interaction_id == c.id)
        .where(c.session_id.in_(session_ids))
        .order_by(c.session_id.desc()),
        execution_options={"yield_per": AT_ONCE},
    )
    shared = _Shared(conn, phrase)
    done: str | None = None  # the last session that was looked at as a whole
    current, state = None, _Matches(phrase, tool)
    with rows:
        for row in rows:
            if row.session_id != current:
                done, current, state = current, row.session_id, _Matches(phrase, tool)
                if len(hits) >= most:
                    return hits, done
            if time.monotonic() > deadline:
                return hits, done or current
            if state.complete:
                continue
            if state.look(row.new_messages, row.answer, shared.snippet(row.system_hash)):
                hits[row.session_id] = {"call": row.id, **state.found}
    return hits, None


class _Matches:
    """What was found of a session so far."""

    def __init__(self, phrase: Phrase | None, tool: str | None) -> None:
        self._phrase, self._tool = phrase, None if tool is None else tool.lower()
        self._has_text, self._has_tool = phrase is None, tool is None
        self.found: Json = {}

    @property
    def complete(self) -> bool:
        return self._has_text and self._has_tool

    def look(self, new_messages: bytes, answer: bytes, in_system: Json | None) -> bool:
        """Look at a call; returns whether the session has everything now."""
        if not self._has_text and self._phrase is not None:
            for blob in (answer, new_messages):
                raw = codec.packed_text(blob)
                snippet = self._phrase.snippet(orjson.loads(raw)) if self._phrase.may_be_in(raw) else None
                if snippet is not None:
                    self.found, self._has_text = snippet | self.found, True
                    break
            else:
                if in_system is not None:
                    self.found, self._has_text = in_system | self.found, True
        if not self._has_tool and self._tool is not None:
            raw = codec.packed_text(answer)
            if '"tool_calls"' in raw:
                names = [name for name in _called(orjson.loads(raw)) if name.lower() == self._tool]
                if names:
                    self.found["tool"], self._has_tool = names[0], True
        return self.complete


class _Shared:
    """System messages, which many calls share: each is looked at once."""

    def __init__(self, conn: Connection, phrase: Phrase | None) -> None:
        self._conn, self._phrase = conn, phrase
        self._known: dict[str, Json | None] = {}

    def snippet(self, content_hash: str | None) -> Json | None:
        if content_hash is None or self._phrase is None:
            return None
        if content_hash not in self._known:
            body = self._conn.execute(select(contents.c.body).where(contents.c.hash == content_hash)).scalar()
            self._known[content_hash] = None if body is None else self._phrase.snippet(codec.unpack_json(body))
        return self._known[content_hash]


def _texts(value: Any) -> Iterator[tuple[str, str]]:
    """The texts of a message or of several, with the role of their message."""
    left: list[tuple[str, Any]] = [("", value)]
    while left:
        role, one = left.pop()
        if isinstance(one, str):
            yield role, one
        elif isinstance(one, list):
            left += [(role, inner) for inner in reversed(one)]
        elif isinstance(one, dict):
            role = str(one["role"])[:20] if "role" in one else role
            left += [(role, inner) for name, inner in reversed(one.items()) if name not in NOT_SAID]


def _called(answer: Any) -> Iterator[str]:
    """The names of an answer's tool calls."""
    for call in (answer or {}).get("tool_calls") or []:
        yield str((call.get("function") or {}).get("name", ""))
