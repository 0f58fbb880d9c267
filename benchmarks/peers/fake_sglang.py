"""A program: SGLang's `/generate` and `/v1/chat/completions` without a model, as fast as Python serves them.

    python -m peers.fake_sglang PAYLOAD.json PORT

Every reply is prepared: whole, or as server-sent events of `stream_interval` tokens (1 unless the request says
otherwise, as in SGLang). Events are sent one by one, a millisecond apart, as an engine sends tokens. After
`POST /delay {"s": 1}` every reply takes 1 s: a whole reply is sent at its end, the events of a stream are spread over
it. The chat route gives logprobs, which training needs, unless the request says `"logprobs": false`. With
`return_token_ids` it gives the token ids of prompt and reply.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import httptools
import orjson
import uvloop

TICK_S = 0.001
PROMPT_IDS = [1000 + (7919 * i) % 40_000 for i in range(2000)]
DONE = b"data: [DONE]\n\n"
JSON_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
INFO = {"model_path": "default", "weight_version": "0", "object": "list", "data": [{"id": "default"}]}


class Replies:
    """The prepared bytes of every reply, in each form that was requested so far."""

    def __init__(self, replies: list[dict[str, Any]]) -> None:
        self._replies = replies
        self._next = count()
        self.generated = cache(self._generated)
        self.chat = cache(self._chat)

    def turn(self) -> int:
        """The number of the next reply."""
        return next(self._next) % len(self._replies)

    def _generated(self, which: int, interval: int | None) -> list[bytes]:
        """/generate: one JSON body, or the chunks of a stream."""
        ids = self._replies[which]["ids"]
        size = interval or len(ids)
        events = [
            orjson.dumps(self._increment(ids, start, min(start + size, len(ids)))) for start in range(0, len(ids), size)
        ]
        return [_whole(events[0])] if interval is None else _stream(events)

    def _increment(self, ids: list[int], start: int, end: int) -> dict[str, Any]:
        done = end == len(ids)
        meta: dict[str, Any] = {
            "id": "0" * 32,
            "finish_reason": {"type": "stop", "matched": ids[-1]} if done else None,
            "prompt_tokens": 2000,
            "weight_version": "0",
            "num_retractions": 0,
            "cached_tokens": 1600,
            "completion_tokens": end,
            "output_token_logprobs": [[_logprob(i), ids[i], None] for i in range(start, end)],
        }
        if done:
            meta |= {"e2e_latency": 0.3, "weight_versions": [{"version": "0", "start": 0, "end": end}]}
        text = "".join(self._replies[0]["pieces"][start:end])
        return {"text": text, "output_ids": ids[start:end], "meta_info": meta}

    def _chat(self, which: int, stream: bool, logprobs: bool, with_ids: bool) -> list[bytes]:
        """/v1/chat/completions: one JSON body, or the chunks of a stream."""
        reply = self._replies[which]
        ids, pieces = reply["ids"], reply["pieces"]
        entries = [
            {"token": piece, "bytes": list(piece.encode()), "logprob": _logprob(i), "top_logprobs": []}
            for i, piece in enumerate(pieces)
        ]
        head = {"id": "0" * 32, "created": 1_700_000_000, "model": "default"}
        usage = {"prompt_tokens": 2000, "completion_tokens": len(ids), "total_tokens": 2000 + len(ids)}
        end = {"finish_reason": "stop", "matched_stop": ids[-1]}
        if not stream:
            choice = {"index": 0, "message": {"role": "assistant", "content": reply["content"]}, **end}
            choice |= {"logprobs": {"content": entries}} if logprobs else {}
            choice |= {"token_ids": ids} if with_ids else {}
            body = {**head, "object": "chat.completion", "choices": [choice], "usage": usage}
            body |= {"prompt_token_ids": PROMPT_IDS} if with_ids else {}
            return [_whole(orjson.dumps(body))]
        head["object"] = "chat.completion.chunk"
        choices: list[dict[str, Any]] = [{"index": 0, "delta": {"role": "assistant", "content": ""}}]
        for i, piece in enumerate(pieces[:-1]):
            choices.append({"index": 0, "delta": {"content": piece}, "finish_reason": None})
            choices[-1] |= {"logprobs": {"content": [entries[i]]}} if logprobs else {}
            choices[-1] |= {"token_ids": [ids[i]]} if with_ids else {}
        choices.append({"index": 0, "delta": {}, **end})
        events = [{**head, "choices": [choice]} for choice in choices]
        events[0] |= {"prompt_token_ids": PROMPT_IDS} if with_ids else {}
        return _stream([orjson.dumps(event) for event in events])


def _logprob(i: int) -> float:
    return -((i * 7919) % 4001) / 1709  # with as many digits as real logprobs


def _whole(body: bytes) -> bytes:
    return JSON_HEAD % len(body) + body


def _stream(events: list[bytes]) -> list[bytes]:
    """The chunks of a chunked response."""
    chunks = [b"data: " + event + b"\n\n" for event in events]
    chunks[-1] += DONE
    framed = [b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks]
    framed[0] = STREAM_HEAD + framed[0]
    framed[-1] += b"0\r\n\r\n"
    return framed


class Engine:
    """The state that all connections share: the replies, the delay, and one clock for all streams."""

    def __init__(self, replies: Replies) -> None:
        self.replies = replies
        self.delay_s = 0.0
        self.loop = asyncio.get_running_loop()
        self._streams: list[tuple[asyncio.Transport, Iterator[bytes], float]] = []
        self._due: list[float] = []

    def send(self, transport: asyncio.Transport, chunks: list[bytes]) -> None:
        """Begin to send a reply."""
        if len(chunks) == 1:
            if self.delay_s:
                self.loop.call_later(self.delay_s, transport.write, chunks[0])
            else:
                transport.write(chunks[0])
            return
        every = self.delay_s / len(chunks) or TICK_S
        if not self._streams:
            self.loop.call_later(TICK_S, self._tick)
        self._streams.append((transport, iter(chunks), every))
        self._due.append(self.loop.time() + every)

    def _tick(self) -> None:
        """Send one event of every stream that is due, without waiting for readers that are slow or gone."""
        now = self.loop.time()
        ended = []
        for i, (transport, chunks, every) in enumerate(self._streams):
            if self._due[i] > now:
                continue
            self._due[i] += every
            chunk = None if transport.is_closing() else next(chunks, None)
            if chunk is None:
                ended.append(i)
            else:
                transport.write(chunk)
        for i in reversed(ended):
            del self._streams[i], self._due[i]
        if self._streams:
            self.loop.call_later(TICK_S, self._tick)


class Connection(asyncio.Protocol):
    """One keep-alive connection, with one request at a time."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def connection_made(self, transport: Any) -> None:
        self._transport: asyncio.Transport = transport
        self._parser = httptools.HttpRequestParser(self)
        self._url, self._body = b"", b""

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        url, body = self._url, self._body
        self._url, self._body = b"", b""
        engine = self._engine
        if url == b"/generate":
            asked = orjson.loads(body)
            interval = asked["sampling_params"].get("stream_interval") or 1
            chunks = engine.replies.generated(engine.replies.turn(), interval if asked.get("stream") else None)
            engine.send(self._transport, chunks)
        elif url == b"/v1/chat/completions":
            asked = orjson.loads(body)
            logprobs = asked.get("logprobs") is not False
            with_ids = bool(asked.get("return_token_ids"))
            chunks = engine.replies.chat(engine.replies.turn(), bool(asked.get("stream")), logprobs, with_ids)
            engine.send(self._transport, chunks)
        else:
            if url == b"/delay":
                engine.delay_s = orjson.loads(body)["s"]
            self._transport.write(_whole(orjson.dumps(INFO)))


async def serve(payload: dict[str, Any], port: int) -> None:
    """Serve until killed."""
    engine = Engine(Replies(payload["replies"]))
    server = await engine.loop.create_server(lambda: Connection(engine), "127.0.0.1", port, backlog=2048)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2])))
