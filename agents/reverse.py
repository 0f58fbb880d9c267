"""An agent for the tiny model: it reverses words of four letters, in one turn or several turns of one conversation."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from openai import AsyncOpenAI

LETTERS = "abcdefghijklmnopqrstuvwxyz"
LENGTH = 4


class ReverseAgent:
    """Each turn asks for one word of `data["words"]`; the reward is the mean `score` of the answers."""

    def __init__(self, turns: int = 1) -> None:
        self.turns = turns

    async def run(self, data: dict[str, Any], **extra: Any) -> float:
        """Ask for each word in turn, in one conversation; returns the mean score."""
        client = AsyncOpenAI(base_url=extra["base_url"], api_key=extra["api_key"], http_client=extra["http_client"])
        messages: list[Any] = []
        scores: list[float] = []
        for word in data["words"][: self.turns]:
            messages.append({"role": "user", "content": word})
            reply = await client.chat.completions.create(model="default", messages=messages, max_tokens=LENGTH + 2)
            answer = reply.choices[0].message.content or ""
            messages.append({"role": "assistant", "content": answer})
            scores.append(score(word, answer))
        return sum(scores) / len(scores)


def score(word: str, answer: str) -> float:
    """1 for the reversed word; else half the share of correct letters, relative to the longer of word and answer."""
    right = sum(a == b for a, b in zip(word[::-1], answer, strict=False))
    return 1.0 if answer == word[::-1] else 0.5 * right / max(len(word), len(answer))


def reversal(completion: str, words: list[str]) -> float:
    """`score` of the answer to a task's first word, for a run whose `reward` is a function."""
    return score(words[0], completion)


def train_tasks(seed: int = 0, count: int = 4096) -> Iterator[dict[str, Any]]:
    """`count` tasks with random words that are not held out."""
    return _tasks(random.Random(f"train-{seed}"), count, held_out=False)


def heldout_tasks() -> list[dict[str, Any]]:
    """64 fixed tasks of words that training never shows."""
    return list(_tasks(random.Random("held out"), 64, held_out=True))


def is_held_out(word: str) -> bool:
    """Whether a word is held out: a fifth of all words is."""
    return random.Random(word).random() < 0.2


def _tasks(rng: random.Random, count: int, *, held_out: bool) -> Iterator[dict[str, Any]]:
    for _ in range(count):
        yield {"words": [_word(rng, held_out=held_out) for _ in range(2)]}


def _word(rng: random.Random, *, held_out: bool) -> str:
    while True:
        word = "".join(rng.choices(LETTERS, k=LENGTH))
        if is_held_out(word) == held_out:
            return word
