"""An agent with two turns, and a tool of long-tailed duration between them. It is copied into a run's folder."""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter
from typing import Any

from openai import AsyncOpenAI

from agentrl.agents.reverse import LENGTH, score


class SlowToolAgent:
    """Asks for two reversed words, and waits for a tool in between; in an evaluation the tool is quick.

    The duration is lognormal. It depends only on the seed, the task, and how often the task was run before.
    """

    def __init__(self, seed: int, median_s: float, sigma: float) -> None:
        self._seed, self._mu, self._sigma = seed, math.log(median_s), sigma
        self._played: Counter[str] = Counter()

    async def run(self, data: dict[str, Any], **extra: Any) -> float:
        """Returns the mean score of both answers. The second call is a new conversation."""
        first, second = data["words"]
        client = AsyncOpenAI(base_url=extra["base_url"], api_key=extra["api_key"], http_client=extra["http_client"])
        before = await ask(client, first)
        await asyncio.sleep(0.0 if extra["is_eval"] else self._latency_s(f"{first} {second}"))
        after = await ask(client, second)
        return (score(first, before) + score(second, after)) / 2

    def _latency_s(self, task: str) -> float:
        self._played[task] += 1
        return random.Random(f"{self._seed} {task} {self._played[task]}").lognormvariate(self._mu, self._sigma)


async def ask(client: AsyncOpenAI, word: str) -> str:
    """The model's answer to one word."""
    messages: Any = [{"role": "user", "content": word}]
    reply = await client.chat.completions.create(model="default", messages=messages, max_tokens=LENGTH + 2)
    return reply.choices[0].message.content or ""
