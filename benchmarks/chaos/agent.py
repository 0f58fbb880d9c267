"""The agent of a chaos run. It is copied into the run's folder, so it imports nothing from this package.

*After* an answer has arrived, it writes the delivered text or the acknowledged reward to a ledger, a synced file of its
own. At the end the database must hold everything in the ledger.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
from typing import Any

import httpx
from openai import AsyncOpenAI

from agentrl.agents.reverse import score


class LedgerAgent:
    """Asks for reversed words, in one turn or two, streamed or not, with random pauses between the calls."""

    def __init__(self, ledger: str, think_s: float) -> None:
        self._file = os.open(ledger, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._think_s = think_s

    async def run(self, data: dict[str, Any], **extra: Any) -> float:
        """Reward each call over REST; returns the mean of the rewards, as the session's reward."""
        client = AsyncOpenAI(base_url=extra["base_url"], api_key=extra["api_key"], http_client=extra["http_client"])
        messages: list[Any] = []
        scores: list[float] = []
        for word in data["words"][: random.randint(1, 2)]:
            messages.append({"role": "user", "content": word})
            call = streamed if random.random() < 0.5 else whole
            call_id, text = await call(client, messages)
            self._write(kind="call", id=call_id.removeprefix("chatcmpl-"), digest=digest(text))
            messages.append({"role": "assistant", "content": text})
            scores.append(score(word, text))
            await asyncio.sleep(random.expovariate(1 / self._think_s))
            await self._reward(call_id, 0.01 * len(text), extra)
        return sum(scores) / len(scores)

    async def _reward(self, call_id: str, value: float, extra: dict[str, Any]) -> None:
        """Send a reward until it is acknowledged, with the same idempotency key each time, so that it counts once."""
        http: httpx.AsyncClient = extra["http_client"]
        session_url = str(extra["base_url"]).removesuffix("/v1")
        body = {"value": value, "name": "length", "interaction_id": call_id, "idempotency_key": f"{call_id}:length"}
        while True:
            try:
                headers = {"Authorization": f"Bearer {extra['api_key']}"}
                answer = await http.post(f"{session_url}/reward", json=body, headers=headers)
            except httpx.TransportError:
                await asyncio.sleep(0.2)
                continue
            if answer.is_success:
                break
            if answer.status_code < 500 and answer.status_code != 429:
                raise RuntimeError(f"the reward was refused: {answer.status_code} {answer.text[:200]}")
            await asyncio.sleep(0.2)
        session_id = session_url.rpartition("/")[2]
        self._write(kind="reward", session=session_id, key=body["idempotency_key"], name="length", value=value)

    def _write(self, **line: Any) -> None:
        os.write(self._file, json.dumps(line).encode() + b"\n")
        os.fsync(self._file)


async def whole(client: AsyncOpenAI, messages: list[Any]) -> tuple[str, str]:
    """Completion id and text of an answer that is not streamed."""
    reply = await client.chat.completions.create(model="default", messages=messages, max_tokens=6)
    return reply.id, reply.choices[0].message.content or ""


async def streamed(client: AsyncOpenAI, messages: list[Any]) -> tuple[str, str]:
    """Completion id and text of a streamed answer. Raises RuntimeError when the stream breaks off: it was not
    delivered.
    """
    stream = await client.chat.completions.create(model="default", messages=messages, max_tokens=6, stream=True)
    call_id, pieces, ended = "", [], False
    async for event in stream:
        call_id = event.id
        for choice in event.choices:
            pieces.append(choice.delta.content or "")
            ended |= choice.finish_reason is not None
    if not ended:
        raise RuntimeError("the stream broke off")
    return call_id, "".join(pieces)


def digest(text: str) -> str:
    """The digest of an answer's text that the ledger records."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
