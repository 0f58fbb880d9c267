"""A table of rollouts for the sinks that show tables: what was asked, answered, rewarded. Its texts are bounded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from agentrl.store.training.sample_rows import SampledRollout

NAME = "samples"
"""The metric under which sinks show the table."""
COLUMNS = (
    "step",
    "session",
    "group",
    "task",
    "prompt",
    "answer",
    "calls",
    "reward",
    "return",
    "advantage",
    "age",
)
CUT = "… [cut]"


@dataclass(frozen=True, slots=True)
class SampleTable:
    """Rows of texts and numbers, each as long as COLUMNS."""

    rows: list[list[str | int | float | None]]

    def as_dicts(self) -> list[dict[str, str | int | float | None]]:
        """The rows as objects."""
        return [dict(zip(COLUMNS, row, strict=True)) for row in self.rows]


def table_of(step: int, samples: Sequence[SampledRollout], most_bytes: int) -> SampleTable:
    """The table of a step's samples; a text has at most `most_bytes`."""
    return SampleTable(
        [
            [
                step,
                sample.session_id,
                sample.group_id,
                _cut(_text(sample.task), most_bytes),
                _cut("\n".join(_said(message) for message in sample.prompt), most_bytes),
                _cut(_said(sample.answer, with_role=False), most_bytes),
                sample.calls,
                sample.reward,
                sample.episode_return,
                sample.advantage,
                sample.age,
            ]
            for sample in samples
        ]
    )


def _said(message: Any, *, with_role: bool = True) -> str:
    """A message as text: its role, its content, and its tool calls."""
    if not isinstance(message, dict):
        return _text(message)
    parts = [_text(message.get("content"))] if message.get("content") else []
    for call in message.get("tool_calls") or ():
        function = call.get("function") or {} if isinstance(call, dict) else {}
        parts.append(f"{function.get('name')}({_text(function.get('arguments'))})")
    return (f"{message.get('role', 'user')}: " if with_role else "") + "\n".join(parts)


def _text(value: Any) -> str:
    """Text as it is; the text parts of a list joined; other values as JSON."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value:
        texts = [part.get("text") for part in value if isinstance(part, dict)]
        if len(texts) == len(value) and all(isinstance(text, str) for text in texts):
            return "".join(map(str, texts))
    return "" if value is None else orjson.dumps(value).decode()


def _cut(text: str, most_bytes: int) -> str:
    data = text.replace("\0", "\ufffd").encode(errors="replace")
    return data.decode() if len(data) <= most_bytes else data[:most_bytes].decode(errors="ignore") + CUT
