"""A program: agents that make calls. It reads orders and writes results, each as one line of JSON.

    python -m peers.load PAYLOAD.json

For each round it reads the order, opens the sessions and writes `{"ready": true}`. The next input line starts the
calls; then it writes the result. A worker has its own connection and makes one call at a time. Workers share the
sessions.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httptools
import orjson
import uvloop

from peers.payload import FIRST, OBSERVATION, SAMPLED, TASK, TURNS

RUN_HEADERS = {"authorization": "Bearer run-key"}


@dataclass
class Order:
    """The order for one round."""

    host: str
    port: int
    opens: bool  # sessions are opened with the proxy first
    path: str  # of a call; `{session}` is replaced
    key: str
    in_flight: int
    sessions: int
    turns: int  # calls in each session
    stream: bool
    first: bool  # every call is the first of its session and shares no prefix
    logprobs: bool | None
    ramp_s: float
    seed: int


class Client(asyncio.Protocol):
    """One connection, one call at a time."""

    async def connect(self, host: str, port: int) -> Client:
        """Open the connection."""
        self._loop = asyncio.get_running_loop()
        self._host = f"{host}:{port}"
        await self._loop.create_connection(lambda: self, host, port)
        return self

    def connection_made(self, transport: Any) -> None:
        self._transport: asyncio.Transport = transport

    async def post(self, path: str, headers: dict[str, str], body: bytes) -> bytes:
        """Send a request; returns the answer's body. Raises RuntimeError unless the status is 200 or 201."""
        lines = [f"POST {path} HTTP/1.1", f"host: {self._host}", "content-type: application/json"]
        lines += [f"content-length: {len(body)}", *(f"{name}: {value}" for name, value in headers.items())]
        self._parts: list[bytes] = []
        self._done = self._loop.create_future()
        self._parser = httptools.HttpResponseParser(self)
        self._transport.write("\r\n".join([*lines, "", ""]).encode() + body)
        await self._done
        answer = b"".join(self._parts)
        if self._parser.get_status_code() not in (200, 201):
            raise RuntimeError(f"{path} answered {self._parser.get_status_code()}: {answer[:500]!r}")
        return answer

    def close(self) -> None:
        """Close the connection."""
        self._transport.close()

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        self._parts.append(body)

    def on_message_complete(self) -> None:
        self._done.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if hasattr(self, "_done") and not self._done.done():
            self._done.set_exception(exc or ConnectionError("the connection was closed before the answer's end"))


class Agents:
    """Makes the bodies of a round's calls."""

    def __init__(self, payload: dict[str, Any], order: Order) -> None:
        self._payload = payload
        self._order = order
        self._rng = random.Random(order.seed)

    def opening(self) -> list[dict[str, Any]]:
        """The messages of a first call."""
        if not self._order.first:
            return [
                {"role": "system", "content": self._payload["system"]},
                {"role": "user", "content": self._text(TASK)},
            ]
        system = self._text(FIRST // 2 - self._payload["system_overhead"])
        return [{"role": "system", "content": system}, {"role": "user", "content": self._text(FIRST // 2)}]

    def history(self, turn: int) -> list[dict[str, Any]]:
        """The messages of call number `turn` (0 is the first), with the replies that the engine would have sent."""
        messages = self.opening()
        for _ in range(turn):
            self.go_on(messages, self._rng.choice(self._payload["replies"])["content"])
        return messages

    def go_on(self, messages: list[dict[str, Any]], reply: str) -> None:
        """Add a reply, and the tool's result for it, to the messages."""
        messages.append({"role": "assistant", "content": reply})
        messages.append({"role": "user", "content": self._text(OBSERVATION)})

    def body(self, messages: list[dict[str, Any]], stream: bool) -> bytes:
        """The body of a call with these messages."""
        body = {"model": "default", "messages": messages, "tools": self._payload["tools"], "max_tokens": 2 * SAMPLED}
        body |= {"stream": True} if stream else {}
        return orjson.dumps(body if self._order.logprobs is None else body | {"logprobs": self._order.logprobs})

    def _text(self, tokens: int) -> str:
        words = self._payload["words"]
        return " ".join(self._rng.choices(words, k=round(tokens * self._payload["words_per_token"])))


@dataclass
class Session:
    """One conversation: its address, and its messages so far."""

    path: str
    headers: dict[str, str]
    messages: list[dict[str, Any]]


async def one_round(payload: dict[str, Any], order: Order, commands: asyncio.StreamReader) -> dict[str, Any]:
    """Open the sessions, wait for the next input line, make the calls; returns the result."""
    agents = Agents(payload, order)
    clients = [await Client().connect(order.host, order.port) for _ in range(order.in_flight)]
    sessions: list[Session] = []
    numbers = iter(range(order.sessions))

    async def opener(client: Client) -> None:
        for number in numbers:
            sessions.append(await opened(client, order, agents, number))

    await asyncio.gather(*(opener(client) for client in clients))
    queue = iter(sessions)
    took: list[float] = []
    rates: list[float] = []
    sizes: list[int] = []

    async def worker(client: Client, number: int) -> None:
        await asyncio.sleep(order.ramp_s * number / order.in_flight)
        began, calls = time.perf_counter(), 0
        for session in queue:
            for turn in range(order.turns):
                started = time.perf_counter()
                answer = await client.post(session.path, session.headers, agents.body(session.messages, order.stream))
                took.append(time.perf_counter() - started)
                sizes.append(len(answer))
                calls += 1
                if turn + 1 < order.turns:
                    agents.go_on(session.messages, text_of(answer, order.stream))
        if calls:
            rates.append(calls / (time.perf_counter() - began))

    say({"ready": True})
    await commands.readline()
    started = time.perf_counter()
    await asyncio.gather(*(worker(client, i) for i, client in enumerate(clients)))
    seconds = time.perf_counter() - started
    for client in clients:
        client.close()
    took.sort()
    return {
        "calls": len(took),
        "seconds": seconds,
        "rate": sum(rates),  # sum over workers, each measured over its own time
        "latency_s": took[len(took) // 2],
        "bytes": sum(sizes) / len(sizes),
    }


async def opened(client: Client, order: Order, agents: Agents, number: int) -> Session:
    """Open a session and make the calls before its measured turns.

    The number of these calls varies by session, so that all turns are measured equally often.
    """
    before = 0 if order.first else number % (TURNS - order.turns + 1)
    if not order.opens:  # the variant has no sessions, so earlier turns need no calls
        path = order.path.format(session=f"{order.seed}-{number}")
        return Session(path, {"authorization": f"Bearer {order.key}"}, agents.history(before))
    answer = await client.post("/groups", RUN_HEADERS, b'{"is_eval": true, "task": {}}')
    found = orjson.loads(answer)["sessions"][0]
    path = found["base_url"].split(str(order.port), 1)[1] + "/chat/completions"
    session = Session(path, {"authorization": f"Bearer {found['api_key']}"}, agents.opening())
    for _ in range(before):
        answer = await client.post(path, session.headers, agents.body(session.messages, stream=False))
        agents.go_on(session.messages, text_of(answer, stream=False))
    return session


def text_of(raw: bytes, stream: bool) -> str:
    """The text of an answer."""
    if not stream:
        return str(orjson.loads(raw)["choices"][0]["message"]["content"])
    text = []
    for line in raw.splitlines():
        if line.startswith(b"data: {"):
            text += [choice["delta"].get("content") or "" for choice in orjson.loads(line[6:])["choices"]]
    return "".join(text)


def say(line: dict[str, Any]) -> None:
    """Write one line of JSON."""
    print(json.dumps(line), flush=True)


async def serve(payload: dict[str, Any]) -> None:
    """Run rounds until the input ends."""
    commands = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
    while line := await commands.readline():
        try:
            say(await one_round(payload, Order(**json.loads(line)), commands))
        except (OSError, RuntimeError) as error:
            say({"error": f"{type(error).__name__}: {error}"})


if __name__ == "__main__":
    uvloop.run(serve(json.loads(Path(sys.argv[1]).read_text())))
