"""Texts of generated episodes: messages in Chat Completions' shape, tools, and tasks. Some words are rare."""

from __future__ import annotations

import random

from agentrl.domain.schemas import Json
from agentrl.store.db import codec
from agentrl.store.db.codec import Content

_SYLLABLES = ("ba", "den", "ko", "lim", "mar", "no", "per", "qui", "ras", "tel", "u", "vor", "wex", "yl", "zan")
WORDS = [a + b for a in _SYLLABLES for b in _SYLLABLES]
COMMON = ("the", "file", "result", "of", "query", "is", "a", "table", "with", "value", "error", "row", "and", "next")
SOURCES = {"arithmetic": 4.0, "search": 3.0, "sql": 2.0, "code": 1.0}
"""Sources of tasks → weights."""


def _tool(name: str, argument: str) -> Json:
    parameters = {"type": "object", "properties": {argument: {"type": "string"}}, "required": [argument]}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


_TOOL_SETS = (
    (_tool("calculator", "expression"),),
    (_tool("search", "query"), _tool("open_page", "url")),
    (_tool("run_sql", "statement"),),
    (_tool("read_file", "path"), _tool("write_file", "path"), _tool("run_tests", "path")),
)
TOOLS = [Content.of(list(tools)) for tools in _TOOL_SETS]
SYSTEMS = [Content.of([{"role": "system", "content": f"You solve tasks of the kind {name}."}]) for name in SOURCES]


def sentence(rng: random.Random, words: int) -> str:
    """Common words, one rare word among them."""
    found = [rng.choice(COMMON) for _ in range(words)]
    found[rng.randrange(words)] = f"{rng.choice(WORDS)}{rng.choice(WORDS)}"
    return " ".join(found)


def task(number: int, source: str, rng: random.Random) -> Json:
    """The data of a task."""
    return {
        "id": f"{source}-{number}",
        "source": source,
        "prompt": f"Task {number}: {sentence(rng, 16)}?",
        "answer": number,
    }


class Texts:
    """Makes the packed messages of calls."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._calls = 0

    def turn(self, first: bool, tool: str | None) -> tuple[bytes, bytes]:
        """(new messages, answer) of a call, packed; the answer calls `tool`, if one is given."""
        rng = self._rng
        new: Json = {"role": "user", "content": sentence(rng, 20)}
        if not first:
            new = {"role": "tool", "tool_call_id": f"call_{self._calls:08x}", "content": sentence(rng, 30)}
        self._calls += 1
        answer: Json = {"role": "assistant", "content": sentence(rng, 24)}
        if tool is not None:
            arguments = codec.json_text({"input": sentence(rng, 4)})
            function = {"name": tool, "arguments": arguments}
            answer["tool_calls"] = [{"id": f"call_{self._calls:08x}", "type": "function", "function": function}]
        return codec.pack_json([new]), codec.pack_json(answer)


def first_prompt(text: str) -> bytes:
    """The packed first messages of an episode."""
    return codec.pack_json([{"role": "user", "content": text}])
