"""Answers questions by searching a local corpus, with a full-text index (SQLite's FTS5, ranked by BM25).

Without a corpus of your own it searches articles about invented people, towns and devices; each of its questions needs
two of them, so no model knows the answers.
"""

from __future__ import annotations

import json
import random
import re
import sqlite3
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from agentrl import Result, ToolError, ToolLoop, UserError, tool
from agentrl.rollout.verifiers.text_match import exact

INSTRUCTIONS = "Search the corpus to answer the question. End with a line `Answer: ` and the answer."
ANSWER = r"Answer:\s*(.+)"
MOST_WORDS = 32
"""Words of a query that are searched."""
SNIPPET_WORDS = 24
RESULTS = 3


class Corpus:
    """An index of articles in memory. Its tools may be used by any number of episodes."""

    def __init__(self, articles: Iterable[tuple[str, str]]) -> None:
        self._index = sqlite3.connect(":memory:", check_same_thread=False)
        self._index.execute("CREATE VIRTUAL TABLE articles USING fts5(title, text, tokenize = 'porter')")
        self._index.executemany("INSERT INTO articles VALUES (?, ?)", articles)

    @tool
    async def search(self, query: str) -> str:
        """Find articles. Returns the titles of the best ones, and the part of each that fits.

        Args:
            query: Words that the article should have.
        """
        words = re.findall(r"\w+", query)[:MOST_WORDS]
        if not words:
            raise ToolError("the query has no words")
        found = self._index.execute(
            f"SELECT title, snippet(articles, 1, '', '', '…', {SNIPPET_WORDS}) FROM articles WHERE articles MATCH ?"
            f" ORDER BY bm25(articles, 4.0, 1.0) LIMIT {RESULTS}",
            [" OR ".join(f'"{word}"' for word in words)],
        )
        return "\n".join(f"{title}: {snippet}" for title, snippet in found) or "nothing found"

    @tool
    async def read(self, title: str) -> str:
        """Read a whole article.

        Args:
            title: The title, as `search` returns it.
        """
        found = self._index.execute("SELECT text FROM articles WHERE title = ? COLLATE NOCASE", [title]).fetchone()
        if found is None:
            raise ToolError(f"there is no article {title[:100]!r}")
        return str(found[0])


class CorpusSearch:
    """Tasks have `question` and `answer`, a text or a list of texts.

    `corpus` is a JSONL file of articles with `title` and `text`.
    """

    def __init__(self, corpus: str | None = None, max_turns: int = 6, max_tokens: int = 512) -> None:
        self.corpus = Corpus(articles() if corpus is None else _read(Path(corpus)))
        self.max_turns, self.max_tokens = max_turns, max_tokens

    async def run(self, data: dict[str, Any], **extra: Any) -> Result:
        """Answer the question. The reward is 1 for the right answer."""
        messages = [{"role": "system", "content": INSTRUCTIONS}, {"role": "user", "content": data["question"]}]
        async with ToolLoop(extra, [self.corpus], max_turns=self.max_turns, max_tokens=self.max_tokens) as loop:
            await loop.run(messages)
            return await loop.result(exact(loop.text, data["answer"], ANSWER))


def _read(file: Path) -> Iterator[tuple[str, str]]:
    try:
        with file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                yield _article(line, f"agent_args.corpus: line {number} of {file}")
    except OSError as error:
        raise UserError(f"agent_args.corpus: {file}: {error.strerror}") from None


def _article(line: str, at: str) -> tuple[str, str]:
    try:
        article = json.loads(line)
        return str(article["title"]), str(article["text"])
    except KeyError as error:
        raise UserError(f"{at} has no {error}") from None
    except (ValueError, TypeError):
        raise UserError(f"{at} is no JSON object") from None


SYLLABLES = ("ba", "do", "fe", "gu", "ka", "li", "mo", "ne", "pra", "ri", "so", "tu", "ve", "xi", "zo")
DEVICES = ("loom", "lantern", "compass", "kiln", "valve", "plough", "press", "lens", "pump", "bell")
PEOPLE = 240


def articles() -> Iterator[tuple[str, str]]:
    """The invented articles: a person, the person's device and the town of birth, again and again."""
    for name, device, town, river, year in _facts():
        yield name, f"{name} was an inventor who was born in {town}. In {year} {name} built the {device}."
        yield device, f"The {device} was built in {year}. Its inventor was {name}."
        yield town, f"{town} is a town on the river {river}."


def train_tasks(seed: int = 0, count: int = 4096) -> Iterator[dict[str, Any]]:
    """`count` questions about three quarters of the people."""
    rng, known = random.Random(f"train-{seed}"), list(_facts())[PEOPLE // 4 :]
    return (_question(rng, fact) for fact in rng.choices(known, k=count))


def heldout_tasks() -> list[dict[str, Any]]:
    """64 fixed questions about the other people."""
    rng, held_out = random.Random("held out"), list(_facts())[: PEOPLE // 4]
    return [_question(rng, fact) for fact in rng.choices(held_out, k=64)]


def _question(rng: random.Random, fact: tuple[str, str, str, str, int]) -> dict[str, Any]:
    name, device, town, river, _ = fact
    return rng.choice(
        [
            {"question": f"In which town was the inventor of the {device} born?", "answer": town},
            {"question": f"On which river is the town where {name} was born?", "answer": river},
        ]
    )


def _facts() -> Iterator[tuple[str, str, str, str, int]]:
    rng = random.Random("corpus")
    words = list({"".join(rng.choices(SYLLABLES, k=3)).capitalize(): None for _ in range(8 * PEOPLE)})
    for _ in range(PEOPLE):
        first, last, town, river, brand = (words.pop() for _ in range(5))
        yield f"{first} {last}", f"{brand} {rng.choice(DEVICES)}", town, river, rng.randint(1600, 1900)
