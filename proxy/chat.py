"""The model routes: `/v1/chat/completions` and `/v1/models`, plain Starlette because every call passes here."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import orjson
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from agentrl.errors import RequestError
from agentrl.proxy import calls, keys
from agentrl.proxy.dialects import openai_chat
from agentrl.proxy.dialects.openai_chat import Answer, ChatRequest
from agentrl.proxy.state import ProxyState
from agentrl.rendering import Delta


async def chat_completions(request: Request) -> Response:
    """OpenAI Chat Completions, streamed as generated or whole."""
    state: ProxyState = request.app.state.proxy
    session_id = await _session_id(request, state)
    body = await read_body(request, state.max_body_bytes)
    chat = openai_chat.decode(body)
    role = request.headers.get("x-turn-type", "main")
    if role not in ("main", "side"):
        raise RequestError(422, f"x-turn-type must be main or side, got {role!r}", code="invalid_parameter")
    call = await calls.begin(state, session_id, body, chat, created=openai_chat.now(), role=role)
    events = calls.run(state, call)
    if chat.stream:
        return await _stream(call, chat, events)
    return Response(openai_chat.encode(await _whole(request, events), chat), media_type="application/json")


async def _whole(request: Request, events: AsyncGenerator[Delta | Answer, None]) -> Answer:
    """The answer alone. Raises RequestError 499, the call being aborted, when the client goes away before that."""
    answering = asyncio.create_task(_last(events))
    leaving = asyncio.create_task(_left(request))
    try:
        await asyncio.wait([answering, leaving], return_when=asyncio.FIRST_COMPLETED)
        if answering.done():
            return answering.result()
    finally:
        for task in (answering, leaving):
            task.cancel()
        await asyncio.wait([answering, leaving])
    raise RequestError(499, "the client went away", code="client_closed_request")


async def _last(events: AsyncGenerator[Delta | Answer, None]) -> Answer:
    async with aclosing(events):
        async for event in events:
            if isinstance(event, Answer):
                return event
    raise AssertionError("a call ends with its answer or an error")


async def _left(request: Request) -> None:
    """Return when the client is gone; the request's body has been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _stream(
    call: calls.Call, chat: ChatRequest, events: AsyncGenerator[Delta | Answer, None]
) -> StreamingResponse:
    """Start the stream once the first event is there, so that an early failure still has its own status."""
    try:
        first = await anext(events)
    except RequestError:
        await events.aclose()
        raise

    async def body() -> AsyncGenerator[bytes, None]:
        yield openai_chat.encode_delta(
            call.completion_id, call.model, call.created, {"role": "assistant", "content": ""}
        )
        async with aclosing(events):
            try:
                event: Delta | Answer = first
                while not isinstance(event, Answer):
                    delta = openai_chat.delta_json(event)
                    yield openai_chat.encode_delta(call.completion_id, call.model, call.created, delta)
                    event = await anext(events)
                yield openai_chat.encode_end(event, chat)
            except RequestError as error:
                yield openai_chat.encode_stream_error(error)

    return StreamingResponse(body(), media_type="text/event-stream", headers={"cache-control": "no-cache"})


async def models(request: Request) -> Response:
    """The one model that this proxy serves."""
    state: ProxyState = request.app.state.proxy
    await keys.authenticate(request, state)
    model = {"id": state.run_name, "object": "model", "created": 0, "owned_by": "agentrl"}
    return Response(orjson.dumps({"object": "list", "data": [model]}), media_type="application/json")


async def _session_id(request: Request, state: ProxyState) -> str:
    """The session of a call: by URL, by session key, or by X-Session-ID with a run key."""
    named: str | None = request.path_params.get("session_id") or request.headers.get("x-session-id")
    if named is not None:
        await keys.session_caller(request, state, named)
        return named
    caller = await keys.authenticate(request, state)
    if caller.session_id is None:
        raise RequestError(
            403, f"a {caller.power} key does not name a session: use a session key, /sessions/ID/v1 or X-Session-ID",
            code="session_required",
        )  # fmt: skip
    return caller.session_id


async def read_body(request: Request, limit: int) -> bytes:
    """The request's body. Raises RequestError 413 when it is longer than `limit` bytes."""
    size, parts = 0, []
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise RequestError(413, f"the body is larger than {limit} bytes", code="body_too_large")
        parts.append(part)
    return b"".join(parts)
