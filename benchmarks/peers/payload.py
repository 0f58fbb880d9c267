"""The texts of agents and engine in `benchmarks/proxy.py`, made once with the model's tokenizer and read by both
programs.

    turn 1   system + tools (800 tokens, the same in all sessions) + task (400, different in each session)
    turn n   all of turn n - 1, the reply as it was delivered (300), an observation (100)

Over the five turns of a session prompts average 2,000 tokens.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from agentrl.rendering import load_renderer

TURNS = 5
SYSTEM, TASK, SAMPLED, OBSERVATION = 800, 400, 300, 100
FIRST = 2000  # tokens of the prompt of a session's first call that shares no prefix
REPLIES = 16
TOOLS = [
    (
        "search",
        "Find files whose text matches a pattern",
        {"pattern": "string", "folder": "string", "limit": "integer"},
    ),
    ("read", "Read some lines of a file", {"path": "string", "first": "integer", "last": "integer"}),
    ("edit", "Replace a piece of text in a file", {"path": "string", "old": "string", "new": "string"}),
    ("shell", "Run a command and return what it prints", {"command": "string", "timeout_s": "number"}),
]


def build(model: Path) -> dict[str, Any]:
    """Texts of these sizes in tokens of `model`, with words drawn from its whole vocabulary."""
    renderer = load_renderer(model)
    rng = random.Random(0)
    words = _words(renderer.decode, renderer.vocab_size, rng)
    per_word = len(renderer.encode(" ".join(words))) / len(words)
    tools = [_tool(*tool) for tool in TOOLS]
    bare = len(renderer.render([{"role": "system", "content": "x"}, {"role": "user", "content": "x"}], tools))

    def text(tokens: int) -> str:
        return " ".join(rng.choices(words, k=round(tokens / per_word)))

    return {
        "words": words,
        "words_per_token": 1 / per_word,
        "system": text(SYSTEM - bare),
        "system_overhead": bare,
        "tools": tools,
        "replies": [_reply(renderer, text) for _ in range(REPLIES)],
    }


def write(model: Path, path: Path) -> None:
    """Write the result of `build` to a JSON file."""
    path.write_text(json.dumps(build(model)))


def _reply(renderer: Any, text: Any) -> dict[str, Any]:
    """A reply of SAMPLED tokens, the end of the turn included, and the text of each token."""
    ids = renderer.encode(text(2 * SAMPLED))[: SAMPLED - 1]
    pieces = [renderer.decode([token]) for token in ids]
    return {"ids": [*ids, renderer.stop_token_ids[0]], "pieces": [*pieces, ""], "content": "".join(pieces)}


def _words(decode: Any, vocab_size: int, rng: random.Random) -> list[str]:
    """The vocabulary's plain words, numbers and pieces of code."""
    tokens = (decode([i]) for i in rng.sample(range(1000, vocab_size), 6000))
    found = [token.strip() for token in tokens if token.isascii() and token.startswith(" ") and token.strip()]
    return [word for word in found if word.isprintable()]


def _tool(name: str, description: str, parameters: dict[str, str]) -> dict[str, Any]:
    properties = {key: {"type": kind, "description": f"The {key} to {name}"} for key, kind in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}
