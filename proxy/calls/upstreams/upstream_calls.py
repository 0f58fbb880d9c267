"""Passes a call that names another model on to its server, and records it as not trainable.

    body ─► requested_upstream ─► Gate.admit ─► intent row ─► POST base_url/… ─► relay ─► client

The upstream decides what it supports: the proxy replaces the model's name, and neither checks nor changes anything else
in the request. A failure keeps the upstream's status and body. The key comes from the proxy's environment; it is
removed from the upstream's answers, so that neither the client nor the store receives it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass

import aiohttp
import msgspec

from agentrl.domain.schemas import Json
from agentrl.errors import RequestError
from agentrl.proxy.access.request_bounds import check_options
from agentrl.proxy.calls import model_call
from agentrl.proxy.calls.call_context import CallContext
from agentrl.proxy.calls.pending_call import CallOrigin
from agentrl.proxy.calls.upstreams import upstream_records
from agentrl.proxy.calls.upstreams.answer_relay import AnswerStart, relay
from agentrl.proxy.calls.upstreams.server_sent_events import storable_json
from agentrl.proxy.calls.upstreams.upstream_models import Upstream
from agentrl.proxy.calls.upstreams.upstream_records import UpstreamCall, params_of
from agentrl.store.db.codec import new_id

CONNECT_S = 5.0
SENT_ON = ("accept", "anthropic-version", "anthropic-beta", "openai-beta")
"""The client's headers that the upstream receives."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Upstreams:
    """The other models that calls may name, and the objects for calling them."""

    configured: Mapping[str, Upstream]
    context: CallContext
    http: aiohttp.ClientSession
    max_answer_bytes: int


async def run(
    upstreams: Upstreams, upstream: Upstream, origin: CallOrigin, path: str, headers: Mapping[str, str], body: bytes
) -> AsyncGenerator[AnswerStart | bytes, None]:
    """The start of the answer, then the bytes of a stream; its end comes after the commit.

    `path` is what follows `/v1`. Raises RequestError: those of the gate; 400 for a body that is not JSON; 502 if the
    upstream cannot be reached, breaks off or sends an invalid answer; 504 after its time limit. Closing the generator
    early aborts the call.
    """
    slots = await upstreams.context.sessions.admit(origin.session_id, 1)
    try:
        call = await _begin(upstreams, upstream, origin, path, headers, body)
    except BaseException:
        slots.cancel()
        raise
    try:
        async with aclosing(_send(upstreams, call)) as parts:
            async for part in parts:
                yield part
    finally:
        slots.close()


async def _begin(
    upstreams: Upstreams, upstream: Upstream, origin: CallOrigin, path: str, headers: Mapping[str, str], body: bytes
) -> UpstreamCall:
    """Make the intent durable. Raises RequestError."""
    context = upstreams.context
    try:
        raw, fields = await context.heavy.run(origin.session_id, len(body), _read, body)
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise RequestError(400, f"the body is not valid JSON: {error}", code="invalid_json") from error
    check_options(params_of(fields))
    call = UpstreamCall(
        id=new_id(),
        session_id=origin.session_id,
        dialect=origin.dialect,
        upstream=upstream,
        url=upstream.base_url + path,
        headers=_headers(upstream, path, headers),
        body=msgspec.json.encode(raw | {"model": upstream.model}),
    )
    await upstream_records.begin(context, origin, call, fields)
    return call


def _read(body: bytes) -> tuple[dict[str, msgspec.Raw], Json]:
    """The fields of a body, as text to send and as values to store. Raises ValueError, RecursionError."""
    return msgspec.json.decode(body, type=dict[str, msgspec.Raw]), storable_json(body)


async def _send(upstreams: Upstreams, call: UpstreamCall) -> AsyncGenerator[AnswerStart | bytes, None]:
    """Send the call and relay its answer. Raises RequestError; the row is then closed with the reason."""
    upstream, context = call.upstream, upstreams.context
    timeout = aiohttp.ClientTimeout(total=upstream.timeout_s, sock_connect=CONNECT_S)
    async with model_call.closing(context, call.id):
        try:
            request = upstreams.http.post(
                call.url, data=call.body, headers=call.headers, timeout=timeout, allow_redirects=False
            )
            async with (
                request as response,
                aclosing(relay(context, call, response, upstreams.max_answer_bytes)) as parts,
            ):
                async for part in parts:
                    yield part
        except TimeoutError as error:
            raise RequestError(
                504, f"{upstream.name} did not answer in {upstream.timeout_s:g} s", code="upstream_timeout"
            ) from error
        except (aiohttp.ClientError, OSError) as error:
            why = upstream.without_key(str(error).encode()).decode() or type(error).__name__
            raise RequestError(502, f"{upstream.name} failed: {why}", code="upstream_unavailable") from error


def _headers(upstream: Upstream, path: str, sent: Mapping[str, str]) -> dict[str, str]:
    headers = {name: sent[name] for name in SENT_ON if name in sent} | {"content-type": "application/json"}
    if upstream.key is not None and path.startswith("/messages"):
        headers["x-api-key"] = upstream.key
    elif upstream.key is not None:
        headers["authorization"] = f"Bearer {upstream.key}"
    return headers
