"""The model routes, one handler for every dialect; plain Starlette, because every call passes here.

body ─► dialect.decode ─► calls.begin ─► calls.run for each answer ─► dialect.encode | dialect.stream
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

import orjson
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from agentrl.errors import RequestError, did_you_mean
from agentrl.proxy import calls, keys, upstreams
from agentrl.proxy.calls import Caller
from agentrl.proxy.dialects import MESSAGES
from agentrl.proxy.dialects.base import Answer, Dialect, Head, ModelRequest, Piece, StreamEncoder, sse
from agentrl.proxy.dialects.models import Model, model_body, models_body
from agentrl.proxy.state import ProxyState
from agentrl.proxy.subagents import session_of_subagent
from agentrl.proxy.upstreams import Start
from agentrl.schemas import Role

T = TypeVar("T")
CALLERS_ROLES = (Role.MAIN, Role.SIDE, Role.SUBAGENT)
Events = AsyncGenerator[tuple[int, Piece | Answer], None]


def endpoint(dialect: Dialect) -> Callable[[Request], Awaitable[Response]]:
    """The handler of a dialect's model calls, streamed as generated or whole."""

    async def handle(request: Request) -> Response:
        state: ProxyState = request.app.state.proxy
        session_id = await session_of(request, state)
        body = await read_body(request, state.max_body_bytes)
        caller = Caller(
            session_id=session_id,
            dialect=dialect,
            digest=hashlib.blake2b(dialect.name.encode() + body, digest_size=16).hexdigest(),
            role=_role(request),
            retry=_retry(request),
        )
        if state.upstreams and (upstream := upstreams.asked_for(state.upstreams, body)) is not None:
            path = request.url.path.rpartition("/v1/")[2]
            passed = await upstreams.begin(state, upstream, caller, f"/{path}", request.headers, body)
            return await _pass_on(request, dialect, upstreams.run(state, passed))
        asked = dialect.decode(body)
        head, begun = await calls.begin(state, caller, asked)
        events = together([calls.run(state, call) for call in begun])
        if asked.stream:
            return await _stream(request, dialect.stream(asked, head), events, len(begun))
        return await _whole(request, dialect, asked, head, events)

    return handle


async def count_tokens(request: Request) -> Response:
    """How many tokens a Messages request would have as its prompt."""
    state: ProxyState = request.app.state.proxy
    session_id = await session_of(request, state)
    asked = MESSAGES.decode_count(await read_body(request, state.max_body_bytes))
    tokens = await calls.count_tokens(state, session_id, asked)
    return Response(MESSAGES.encode_count(tokens), media_type="application/json")


async def together(runs: list[AsyncGenerator[Piece | Answer, None]]) -> Events:
    """The events of several calls as they come, each with the index of its call. Closing it closes all of them."""
    if len(runs) == 1:
        async with aclosing(runs[0]) as only:
            async for event in only:
                yield 0, event
        return
    news: asyncio.Queue[tuple[int, Piece | Answer | BaseException]] = asyncio.Queue()

    async def follow(index: int, run: AsyncGenerator[Piece | Answer, None]) -> None:
        try:
            async with aclosing(run):
                async for event in run:
                    news.put_nowait((index, event))
        except RequestError as error:
            news.put_nowait((index, error))

    tasks = [asyncio.create_task(follow(index, run)) for index, run in enumerate(runs)]
    try:
        left = len(runs)
        while left:
            index, new = await news.get()
            if isinstance(new, BaseException):
                raise new
            left -= isinstance(new, Answer)
            yield index, new
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def _whole(request: Request, dialect: Dialect, asked: ModelRequest, head: Head, events: Events) -> Response:
    """All answers in one body. Raises RequestError 499, the calls being aborted, when the client leaves before that."""
    answers = await _unless_left(request, _answers(events))
    return Response(dialect.encode(asked, head, answers), media_type="application/json")


async def _unless_left(request: Request, answer: Coroutine[Any, Any, T]) -> T:
    """What is awaited. Raises RequestError 499, it being cancelled, when the client leaves before that."""
    answering = asyncio.create_task(answer)
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


async def _answers(events: Events) -> list[Answer]:
    """The answers in the order of their choices."""
    found: dict[int, Answer] = {}
    async with aclosing(events):
        async for index, event in events:
            if isinstance(event, Answer):
                found[index] = event
    return [found[index] for index in sorted(found)]


async def _pass_on(request: Request, dialect: Dialect, parts: AsyncGenerator[Start | bytes, None]) -> Response:
    """The answer of another model, as it comes."""

    async def first() -> Start | bytes:
        return await anext(parts)

    start = await _unless_left(request, first())
    assert isinstance(start, Start)
    if start.body is not None:
        await parts.aclose()
        return Response(start.body, start.status, start.headers)

    async def body() -> AsyncGenerator[bytes, None]:
        async with aclosing(parts):
            try:
                async for part in parts:
                    assert isinstance(part, bytes)
                    yield part
            except RequestError as error:
                yield sse({"type": "error", **orjson.loads(dialect.encode_error(error))}, "error")

    return StreamingResponse(body(), start.status, start.headers)


async def _left(request: Request) -> None:
    """Return when the client is gone; the request's body has been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _stream(request: Request, encoder: StreamEncoder, events: Events, choices: int) -> StreamingResponse:
    """Start the stream once the first event is there, so that an early failure still has its own status.

    Raises RequestError 499, the calls being aborted, when the client leaves before that.
    """

    async def start() -> tuple[int, Piece | Answer]:
        return await anext(events)

    first = await _unless_left(request, start())

    async def body() -> AsyncGenerator[bytes, None]:
        found: dict[int, Answer] = {}
        yield encoder.start()
        async with aclosing(events):
            try:
                index, event = first
                while True:
                    if isinstance(event, Answer):
                        found[index] = event
                        out = encoder.finish(index, event)
                    else:
                        out = encoder.piece(index, event)
                    if out:
                        yield out
                    if len(found) == choices:
                        break
                    index, event = await anext(events)
                yield encoder.end([found[index] for index in sorted(found)])
            except RequestError as error:
                yield encoder.error(error)

    return StreamingResponse(body(), media_type="text/event-stream", headers={"cache-control": "no-cache"})


async def models(request: Request) -> Response:
    """The policy and the upstreams, or the one of them that is named."""
    state: ProxyState = request.app.state.proxy
    await keys.authenticate(request, state)
    served = [Model(name=state.run_name, created=state.run_created_at, max_context=state.renderer.max_context)]
    served += [Model(name=name, created=state.run_created_at) for name in state.upstreams]
    anthropic = "anthropic-version" in request.headers
    name = request.path_params.get("model")
    body = models_body(served, anthropic=anthropic) if name is None else model_body(served, name, anthropic=anthropic)
    return Response(body, media_type="application/json")


async def session_of(request: Request, state: ProxyState) -> str:
    """The session of a call: by URL, by session key, by X-Session-ID with a run key; a sub-agent's by its name too."""
    if (of_subagent := await session_of_subagent(request, state)) is not None:
        return of_subagent
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


def _role(request: Request) -> Role | None:
    """What the caller says of the call."""
    said = request.headers.get("x-turn-type")
    if said is None:
        return None
    if said not in CALLERS_ROLES:
        raise RequestError(
            422, f"x-turn-type {said!r} is unknown{did_you_mean(said, CALLERS_ROLES)}", code="invalid_parameter",
            param="x-turn-type",
        )  # fmt: skip
    return Role(said)


def _retry(request: Request) -> int:
    """How often the client's SDK has sent this request before."""
    said = request.headers.get("x-stainless-retry-count", "0")
    return int(said) if said.isascii() and said.isdecimal() and len(said) < 10 else 0


async def read_body(request: Request, limit: int) -> bytes:
    """The request's body. Raises RequestError 413 when it is longer than `limit` bytes."""
    size, parts = 0, []
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise RequestError(413, f"the body is larger than {limit} bytes", code="body_too_large")
        parts.append(part)
    return b"".join(parts)
