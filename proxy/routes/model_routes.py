"""The model routes, one handler for every dialect; plain Starlette, because every call passes here.

body ─► dialect.decode ─► exchanges.exchange_for ─► Reply ─► dialect.encode | dialect.stream
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import orjson
from blake3 import blake3
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from agentrl.domain.schemas import Role
from agentrl.errors import RequestError, did_you_mean
from agentrl.proxy.access import authentication, limits
from agentrl.proxy.access.client_names import client_of
from agentrl.proxy.calls import model_call
from agentrl.proxy.calls.exchanges import ClientLeft, Event, Exchange
from agentrl.proxy.calls.live_sessions import LiveSessions
from agentrl.proxy.calls.model_call import CallOrigin
from agentrl.proxy.calls.prompts.request_prompts import told_to_think
from agentrl.proxy.calls.upstreams import Start, asked_for
from agentrl.proxy.calls.upstreams import run as run_upstream
from agentrl.proxy.dialects import MESSAGES
from agentrl.proxy.dialects.dialect import Answer, Dialect, ModelRequest, StreamEncoder, sse
from agentrl.proxy.dialects.model_names import Model, model_body, models_body
from agentrl.proxy.routes import app_parts
from agentrl.proxy.sessions.named_sessions import is_done
from agentrl.store.db.codec import hash_key

T = TypeVar("T")
AREALS = "agentrl.areal"
"""Key of the scope of a request that came by AReaL's paths, where `store: false` keeps a call out of training."""
CALLERS_ROLES = (Role.MAIN, Role.SIDE, Role.SUBAGENT)


def endpoint(dialect: Dialect) -> Callable[[Request], Awaitable[Response]]:
    """The handler of a dialect's model calls, streamed as generated or whole."""

    async def handle(request: Request) -> Response:
        context, upstreams = app_parts.context(request), app_parts.upstreams(request)
        session_id = await app_parts.finder(request).of_call(request, opens=True)
        over = partial(app_parts.ends(request).after_answer, session_id) if is_done(request) else None
        body = await app_parts.body_limits(request).read(request)
        heavy = partial(context.heavy.run, session_id, len(body))
        origin = request.state.origin = CallOrigin(
            session_id=session_id,
            dialect=dialect,
            digest=await heavy(_digest, dialect.name.encode(), body),
            role=_role(request),
            retry=_retry(request),
            client=client_of(request),
            repeat_key=None if (repeat := authentication.repeat_key(request)) is None else hash_key(repeat),
        )
        upstream = await heavy(asked_for, upstreams.configured, body) if upstreams.configured else None
        if upstream is not None:
            path = request.url.path.rpartition("/v1/")[2]
            parts = run_upstream(upstreams, upstream, origin, f"/{path}", request.headers, body)
            response = await _pass_on(request, dialect, parts)
            response.background = None if over is None else BackgroundTask(over)
            return response
        asked = told_to_think(context, replace(await heavy(dialect.decode, body), size=len(body)))
        limits.check(asked)
        if request.scope.get(AREALS) and getattr(asked.wire, "store", None) is False:
            origin = replace(origin, role=Role.SIDE, trains=False)
        finding = app_parts.answers(request).find(origin, asked)
        comes_back = origin.retry or origin.repeat_key is not None  # it may have to wait: watch for its disconnect
        return Reply(dialect, asked, await (_unless_left(request, finding) if comes_back else finding), over)

    return handle


async def count_tokens(request: Request) -> Response:
    """How many tokens a Messages request would have as its prompt."""
    context = app_parts.context(request)
    session_id = await app_parts.finder(request).of_call(request)
    body = await app_parts.body_limits(request).read(request)
    async with slot_for(context.sessions, session_id):
        asked = await context.heavy.run(session_id, len(body), MESSAGES.decode_count, body)
        limits.check(asked)
        asked = told_to_think(context, replace(asked, size=len(body)))
        tokens = await model_call.count_tokens(context, session_id, asked)
    return Response(MESSAGES.encode_count(tokens), media_type="application/json")


@asynccontextmanager
async def slot_for(sessions: LiveSessions, session_id: str) -> AsyncGenerator[None, None]:
    """A slot for a request of a session that does not sample. Raises RequestError 404, 429."""
    slots = await sessions.admit(session_id, 1, samples=False)
    try:
        yield
    finally:
        slots.close()


def _digest(name: bytes, body: bytes) -> str:
    return blake3(name + body).hexdigest(16)


class Reply(Response):
    """The answers of an exchange in a dialect, streamed as they are sampled or whole.

    A stream begins with the first event, so that an early failure still has its own status.
    """

    def __init__(
        self,
        dialect: Dialect,
        asked: ModelRequest,
        exchange: Exchange,
        after: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._dialect = dialect
        self._asked = asked
        self._exchange = exchange
        self._after = after  # once the client has the end
        self.status_code = 200
        self.streamed = asked.stream
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answers. Raises RequestError when they fail before anything is sent."""
        exchange = self._exchange
        left = asyncio.create_task(_left(receive))
        left.add_done_callback(lambda _: exchange.wake())
        exchange.join()
        ended = False
        try:
            ended = await (self._stream(left, send) if self._asked.stream else self._whole(left, send))
        except ClientLeft:
            pass
        finally:
            left.cancel()
            if ended:
                exchange.mark_delivered()
            else:
                exchange.leave()
        if ended and self._after is not None:
            await self._after()

    async def _whole(self, left: asyncio.Task[None], send: Send) -> bool:
        found: dict[int, Answer] = {}
        while len(found) < self._asked.choices:
            found |= _answers(await self._exchange.after(len(found), left))
        body = self._dialect.encode(self._asked, self._exchange.head, [found[index] for index in sorted(found)])
        await _still_there(left)
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})
        return True

    async def _stream(self, left: asyncio.Task[None], send: Send) -> bool:
        """Whether the stream came to its end, and did not break off."""
        news = await self._exchange.after(0, left)
        encoder = self._dialect.stream(self._asked, self._exchange.head)
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        found: dict[int, Answer] = {}
        out, seen, whole = encoder.start(), 0, True
        try:
            while news:
                seen += len(news)
                found |= _answers(news)
                if out := out + _encoded(encoder, news):
                    await send({"type": "http.response.body", "body": out, "more_body": True})
                    out = b""
                news = await self._exchange.after(seen, left)
            last = encoder.end([found[index] for index in sorted(found)])
        except RequestError as error:
            last, whole = encoder.error(error), False
        await _still_there(left)
        await send({"type": "http.response.body", "body": last})
        return whole


async def _still_there(left: asyncio.Task[None]) -> None:
    """Raises ClientLeft when the client is gone, before the end of the answer is sent to nobody."""
    await asyncio.sleep(0)  # lets it be noticed
    if left.done():
        raise ClientLeft


def _answers(news: list[Event]) -> dict[int, Answer]:
    """The answers among some events, by choice."""
    return {choice: event for choice, event in news if isinstance(event, Answer)}


def _encoded(encoder: StreamEncoder, news: list[Event]) -> bytes:
    """What to send of some events."""
    return b"".join(
        encoder.finish(choice, event) if isinstance(event, Answer) else encoder.piece(choice, event)
        for choice, event in news
    )


async def _unless_left(request: Request, answer: Coroutine[Any, Any, T]) -> T:
    """What is awaited. Raises RequestError 499, it being cancelled, when the client leaves before that."""
    answering = asyncio.create_task(answer)
    leaving = asyncio.create_task(_left(request.receive))
    try:
        await asyncio.wait([answering, leaving], return_when=asyncio.FIRST_COMPLETED)
        if answering.done():
            return answering.result()
    finally:
        for task in (answering, leaving):
            task.cancel()
        await asyncio.wait([answering, leaving])
    raise RequestError(499, "the client went away", code="client_closed_request")


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


async def _left(receive: Receive) -> None:
    """Return when the client is gone; the request's body has been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def models(request: Request) -> Response:
    """The policy and the upstreams, or the one of them that is named."""
    await app_parts.access(request).authenticate(request)
    context = app_parts.context(request)
    name, created = context.store.run_name, context.store.run_created_at
    served = [Model(name=name, created=created, max_context=context.renderer.max_context)]
    served += [Model(name=name, created=created) for name in app_parts.upstreams(request).configured]
    anthropic = "anthropic-version" in request.headers
    asked = request.path_params.get("model")
    if asked is None:
        body = models_body(served, anthropic=anthropic)
    else:
        body = model_body(served, asked, anthropic=anthropic, aliases=context.settings.model_aliases)
    return Response(body, media_type="application/json")


def _role(request: Request) -> Role | None:
    """What the caller says of the call."""
    said = request.headers.get("x-turn-type")
    if said is None:
        return None
    if said not in CALLERS_ROLES:
        raise RequestError(
            400,
            f"x-turn-type {said!r} is unknown{did_you_mean(said, CALLERS_ROLES)}",
            code="invalid_parameter",
            param="x-turn-type",
        )
    return Role(said)


def _retry(request: Request) -> int:
    """How often the client's SDK has sent this request before."""
    said = request.headers.get("x-stainless-retry-count", "0")
    return int(said) if said.isascii() and said.isdecimal() and len(said) < 10 else 0
