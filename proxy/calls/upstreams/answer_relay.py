"""Relays an upstream's answer to the client and records it.

    HTTP error      record the failure ──► status and body as they are
    whole answer    read ──► commit ──► body
    stream          events as they arrive ──► from a tool call or the end on: hold, commit, then send

An agent acts on a tool call or a complete answer, so these are sent after the commit. The upstream's key is removed
from everything that it sends.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import aiohttp

from agentrl.errors import RequestError
from agentrl.proxy.calls.call_context import CallContext
from agentrl.proxy.calls.upstreams import upstream_records
from agentrl.proxy.calls.upstreams.output_counts import OutputCount
from agentrl.proxy.calls.upstreams.server_sent_events import data_of, split_events, storable_json
from agentrl.proxy.calls.upstreams.upstream_records import UpstreamCall
from agentrl.proxy.dialects.upstream_event import UpstreamEvent

SENT_BACK = ("content-type", "retry-after", "retry-after-ms", "x-should-retry")
"""The upstream's headers that the client receives."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerStart:
    """Status and headers of the answer to the client; with `body` None it is streamed."""

    status: int
    headers: dict[str, str]
    body: bytes | None


async def relay(
    context: CallContext, call: UpstreamCall, response: aiohttp.ClientResponse, max_answer_bytes: int
) -> AsyncGenerator[AnswerStart | bytes, None]:
    """The start of the answer, then the bytes of a stream. Raises RequestError 502 for an invalid answer."""
    headers = {name: value for name, value in response.headers.items() if name.lower() in SENT_BACK}
    headers["x-interaction-id"] = call.id
    chunks = _chunks(call, response, max_answer_bytes)
    streamed = AnswerStart(status=response.status, headers=headers, body=None)
    if response.status >= 400:
        yield await _refused(context, call, streamed, chunks)
    elif response.status >= 300:
        raise _failed(call, "redirects: check its base_url")
    elif response.content_type != "text/event-stream":
        yield await _whole(context, call, streamed, chunks)
    else:
        async with aclosing(_streamed(context, call, streamed, chunks)) as parts:
            async for part in parts:
                yield part


async def _refused(
    context: CallContext, call: UpstreamCall, start: AnswerStart, chunks: AsyncGenerator[bytes, None]
) -> AnswerStart:
    """An HTTP error, recorded as the call's failure."""
    body = await _read(call, chunks)
    await upstream_records.fail(context, call, f"HTTP {start.status}: {body.decode(errors='replace')}")
    return AnswerStart(status=start.status, headers=start.headers, body=body)


async def _whole(
    context: CallContext, call: UpstreamCall, start: AnswerStart, chunks: AsyncGenerator[bytes, None]
) -> AnswerStart:
    """An answer in one JSON object, after its commit. Raises RequestError 502 if it is not one."""
    started_at = time.time()
    body = await _read(call, chunks)
    try:
        answer = storable_json(body)
        if not isinstance(answer, dict):
            raise ValueError("it is not an object")
    except ValueError as error:
        raise _failed(call, f"did not answer with a JSON object: {error}") from error
    event, count = call.dialect.read_upstream(answer), OutputCount()
    count.add(event)
    await upstream_records.commit(context, call, answer, event.finish_reason, started_at, count.tokens)
    return AnswerStart(status=start.status, headers=start.headers, body=body)


async def _streamed(
    context: CallContext, call: UpstreamCall, start: AnswerStart, chunks: AsyncGenerator[bytes, None]
) -> AsyncGenerator[AnswerStart | bytes, None]:
    """The events as they arrive. From a tool call, an error or the end on they are held until the row is written.

    Raises RequestError 502 if the stream ends without a finish reason or an error.
    """
    started_at, count, started = time.time(), OutputCount(), False
    recorded: list[Any] = []
    held: list[bytes] = []
    reason = problem = None
    async with aclosing(split_events(chunks)) as events:
        async for raw in events:
            sent = call.upstream.without_key(raw)
            data = data_of(sent)
            event = UpstreamEvent()
            if data is not None:
                recorded.append(data)
                event = call.dialect.read_upstream(data)
                count.add(event)
            reason, problem = reason or event.finish_reason, problem or event.error
            if not started:
                yield start
                started = True
            if held or reason or problem or event.begins_tool_call:
                held.append(sent)
            else:
                yield sent
            if event.is_last:
                break
    if problem is not None:
        await upstream_records.fail(context, call, problem)
    elif reason is not None:
        await upstream_records.commit(context, call, {"events": recorded}, reason, started_at, count.tokens)
    else:
        raise _failed(call, "broke off")
    yield b"".join(held)


async def _read(call: UpstreamCall, chunks: AsyncGenerator[bytes, None]) -> bytes:
    return call.upstream.without_key(b"".join([chunk async for chunk in chunks]))


async def _chunks(
    call: UpstreamCall, response: aiohttp.ClientResponse, max_answer_bytes: int
) -> AsyncGenerator[bytes, None]:
    """The body as it arrives. Raises RequestError 502 for more than `max_answer_bytes`."""
    size = 0
    async for chunk in response.content.iter_any():
        size += len(chunk)
        if size > max_answer_bytes:
            raise _failed(call, f"answered more than {max_answer_bytes} bytes")
        yield chunk


def _failed(call: UpstreamCall, why: str) -> RequestError:
    return RequestError(502, f"{call.upstream.name} {why}", code="upstream_failed")
