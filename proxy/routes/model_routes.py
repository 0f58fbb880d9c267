"""The model routes, one handler for every dialect. They are plain Starlette, because every call passes through them.

body ─► dialect.decode ─► AnswerFinder.find ─► Reply ─► dialect.encode | dialect.stream
    └► names an upstream ─► upstreams.run ─► the upstream's own bytes
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from functools import partial

import orjson
from blake3 import blake3
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from agentrl.domain.schemas import Role
from agentrl.errors import RequestError, bad_parameter, did_you_mean
from agentrl.proxy.access import authentication, limits
from agentrl.proxy.access.client_names import client_of
from agentrl.proxy.calls import model_call
from agentrl.proxy.calls.live_sessions import LiveSessions
from agentrl.proxy.calls.pending_call import CallOrigin
from agentrl.proxy.calls.prompts.prompt_options import with_thinking_option
from agentrl.proxy.calls.upstreams.answer_relay import AnswerStart
from agentrl.proxy.calls.upstreams.upstream_calls import run as run_upstream
from agentrl.proxy.calls.upstreams.upstream_models import requested_upstream
from agentrl.proxy.dialects import MESSAGES
from agentrl.proxy.dialects.dialect import Dialect
from agentrl.proxy.dialects.event_encoding import sse
from agentrl.proxy.dialects.model_names import Model, model_body, models_body
from agentrl.proxy.routes import app_parts
from agentrl.proxy.routes.client_disconnect import unless_disconnected
from agentrl.proxy.routes.model_reply import Reply
from agentrl.proxy.sessions.named_sessions import is_done
from agentrl.store.db.codec import hash_key

AREALS = "agentrl.areal"
"""Scope key of a request on AReaL's paths, where `store: false` keeps a call out of training."""
CALLERS_ROLES = (Role.MAIN, Role.SIDE, Role.SUBAGENT)


def endpoint(dialect: Dialect) -> Callable[[Request], Awaitable[Response]]:
    """The handler of a dialect's model calls."""

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
        upstream = await heavy(requested_upstream, upstreams.configured, body) if upstreams.configured else None
        if upstream is not None:
            path = request.url.path.rpartition("/v1/")[2]
            parts = run_upstream(upstreams, upstream, origin, f"/{path}", request.headers, body)
            response = await _pass_on(request, dialect, parts)
            response.background = None if over is None else BackgroundTask(over)
            return response
        asked = with_thinking_option(context, replace(await heavy(dialect.decode, body), size=len(body)))
        limits.check(asked)
        if request.scope.get(AREALS) and getattr(asked.wire, "store", None) is False:
            origin = replace(origin, role=Role.SIDE, trains=False)
        finding = app_parts.answers(request).find(origin, asked)
        comes_back = origin.retry or origin.repeat_key is not None  # it may have to wait: watch for its disconnect
        return Reply(dialect, asked, await (unless_disconnected(request, finding) if comes_back else finding), over)

    return handle


async def count_tokens(request: Request) -> Response:
    """Count the prompt tokens of a Messages request."""
    context = app_parts.context(request)
    session_id = await app_parts.finder(request).of_call(request)
    body = await app_parts.body_limits(request).read(request)
    async with slot_for(context.sessions, session_id):
        asked = await context.heavy.run(session_id, len(body), MESSAGES.decode_count, body)
        limits.check(asked)
        asked = with_thinking_option(context, replace(asked, size=len(body)))
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


async def _pass_on(request: Request, dialect: Dialect, parts: AsyncGenerator[AnswerStart | bytes, None]) -> Response:
    """The answer of another model, passed on as it arrives."""

    async def first() -> AnswerStart | bytes:
        return await anext(parts)

    start = await unless_disconnected(request, first())
    assert isinstance(start, AnswerStart)
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


async def models(request: Request) -> Response:
    """The policy and the upstreams, or the model that the path names."""
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
    """The role that the caller gives the call, in X-Turn-Type."""
    said = request.headers.get("x-turn-type")
    if said is None:
        return None
    if said not in CALLERS_ROLES:
        raise bad_parameter("x-turn-type", f"x-turn-type {said!r} is unknown{did_you_mean(said, CALLERS_ROLES)}")
    return Role(said)


def _retry(request: Request) -> int:
    """The number of times that the client's SDK has sent this request before."""
    said = request.headers.get("x-stainless-retry-count", "0")
    return int(said) if said.isascii() and said.isdecimal() and len(said) < 10 else 0
