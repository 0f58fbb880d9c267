"""Other models beside the policy: a call that names one is passed on as it is, and recorded as not trainable.

    body ─► asked_for ─► Gate.admit ─► intent row ─► POST base_url/… ──► the answer, whole, after the commit
                                                                    └──► its events as they come; from the one that
                                                                         ends the answer on, after the commit

The upstream decides what it supports: nothing of the request is checked or changed but the model's name. A failure
keeps the upstream's own status and body. The key comes from the proxy's environment; it is cut out of whatever the
upstream says, so that it reaches neither the caller nor the store.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Self

import aiohttp
import msgspec
import orjson

from agentrl.configs.proxy_config import UpstreamConfig
from agentrl.domain.schemas import InteractionStatus, Json, Role
from agentrl.domain.tokens import TokenIds
from agentrl.errors import ConfigError, RequestError
from agentrl.proxy.access.request_bounds import MAX_INT32, check_options
from agentrl.proxy.calls import model_call
from agentrl.proxy.calls.call_context import CallContext
from agentrl.proxy.calls.pending_call import CallOrigin
from agentrl.store.calls import call_intents, call_outcomes, running_calls
from agentrl.store.db.codec import Content, new_id
from agentrl.store.sessions import session_usage

HIDDEN = b"[key]"
CONNECT_S = 5.0
SENT_ON = ("accept", "anthropic-version", "anthropic-beta", "openai-beta")
SENT_BACK = ("content-type", "retry-after", "retry-after-ms", "x-should-retry")
CONVERSATION = ("messages", "input", "prompt")
SHARED = ("model", "tools", *CONVERSATION)
"""Parts of a request that are stored apart from its parameters."""
DONE = "[DONE]"
END_OF_EVENT = re.compile(rb"\r?\n\r?\n")


@dataclass(frozen=True, kw_only=True, slots=True)
class Upstream:
    """A model of another server."""

    name: str
    base_url: str
    model: str
    timeout_s: float
    key: str | None = field(repr=False)

    def without_key(self, said: bytes) -> bytes:
        """What the upstream said, should it repeat the key."""
        return said if self.key is None else said.replace(self.key.encode(), HIDDEN)


@dataclass(frozen=True, kw_only=True, slots=True)
class Upstreams:
    """The other models that calls may name, and how they are reached."""

    configured: Mapping[str, Upstream]
    context: CallContext
    http: aiohttp.ClientSession
    max_answer_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Passed:
    """A call whose intent is recorded and that is to be passed on."""

    id: str
    session_id: str
    upstream: Upstream
    url: str
    headers: dict[str, str]
    body: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """How the answer begins; with `body` None it is streamed."""

    status: int
    headers: dict[str, str]
    body: bytes | None


class Spent:
    """The tokens that an answer says it took. One that says nothing counts as a token for each of its events."""

    def __init__(self) -> None:
        self._said = 0
        self._events = 0

    def told(self, data: Any) -> Self:
        """A whole answer, or an event of a streamed one, in any dialect. Streams repeat their total as it grows."""
        self._events += 1
        match data:
            case {"usage": {} as said} | {"response": {"usage": {} as said}} | {"message": {"usage": {} as said}}:
                for name in ("completion_tokens", "output_tokens"):
                    tokens = said.get(name)
                    if isinstance(tokens, int) and 0 < tokens <= MAX_INT32:
                        self._said = max(self._said, tokens)
        return self

    @property
    def tokens(self) -> int:
        """How many."""
        return self._said or self._events


class _Named(msgspec.Struct):
    model: Any = None


def from_config(configured: Mapping[str, UpstreamConfig]) -> dict[str, Upstream]:
    """The upstreams of a run, with their keys from the environment. Raises ConfigError where one is missing."""
    found: dict[str, Upstream] = {}
    for name, config in configured.items():
        key = None
        if config.api_key_env is not None:
            key = os.environ.get(config.api_key_env, "").strip()
            if not (key.isascii() and key.isprintable() and key):
                raise ConfigError(
                    f"config key 'proxy.upstreams.{name}.api_key_env': the environment variable "
                    f"{config.api_key_env} holds no key"
                )
        found[name] = Upstream(
            name=name, base_url=config.base_url, model=config.model or name, timeout_s=config.timeout_s, key=key
        )
    return found


def asked_for(configured: Mapping[str, Upstream], body: bytes) -> Upstream | None:
    """The upstream that a request names; None for the policy's, and for bodies that its dialect will refuse."""
    try:
        model = msgspec.json.decode(body, type=_Named).model
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return configured.get(model) if isinstance(model, str) else None


async def run(
    upstreams: Upstreams, upstream: Upstream, origin: CallOrigin, path: str, headers: Mapping[str, str], body: bytes
) -> AsyncGenerator[Start | bytes, None]:
    """How the answer begins, then, if it is streamed, its bytes; what ends it comes after the commit.

    `path` is what follows `/v1`. Raises RequestError: as the gate does, 400 for a body that is no JSON, 502 when the
    upstream cannot be reached, breaks off or answers nonsense, 504 when it is late. Closing the generator early aborts
    the call.
    """
    slots = await upstreams.context.sessions.admit(origin.session_id, 1)
    try:
        passed = await _begin(upstreams, upstream, origin, path, headers, body)
    except BaseException:
        slots.cancel()
        raise
    try:
        async with aclosing(_ask(upstreams, passed)) as parts:
            async for part in parts:
                yield part
    finally:
        slots.close()


async def _begin(
    upstreams: Upstreams, upstream: Upstream, origin: CallOrigin, path: str, headers: Mapping[str, str], body: bytes
) -> Passed:
    """Make the intent durable. Raises RequestError."""
    try:
        fields, asked = await upstreams.context.heavy.run(origin.session_id, len(body), _read, body)
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise RequestError(400, f"the body is not valid JSON: {error}", code="invalid_json") from error
    check_options({name: value for name, value in asked.items() if name not in SHARED})
    passed = Passed(
        id=new_id(),
        session_id=origin.session_id,
        upstream=upstream,
        url=upstream.base_url + path,
        headers=_headers(upstream, path, headers),
        body=msgspec.json.encode(fields | {"model": upstream.model}),
    )
    upstreams.context.serving.add(passed.id)
    try:
        await upstreams.context.store.write(call_intents.begin, _intent(upstreams, origin, passed, asked))
    except BaseException:  # the row may be there all the same: the sweep finds it
        upstreams.context.serving.discard(passed.id)
        raise
    return passed


def _read(body: bytes) -> tuple[dict[str, msgspec.Raw], Json]:
    """The fields of a body as they are written, and as they are stored. Raises ValueError, RecursionError."""
    return msgspec.json.decode(body, type=dict[str, msgspec.Raw]), _storable(body)


async def _ask(upstreams: Upstreams, passed: Passed) -> AsyncGenerator[Start | bytes, None]:
    upstream = passed.upstream
    timeout = aiohttp.ClientTimeout(total=upstream.timeout_s, sock_connect=CONNECT_S)
    async with model_call.closing(upstreams.context, passed.id):
        try:
            request = upstreams.http.post(
                passed.url, data=passed.body, headers=passed.headers, timeout=timeout, allow_redirects=False
            )
            async with request as response, aclosing(_relay(upstreams, passed, response)) as parts:
                async for part in parts:
                    yield part
        except TimeoutError as error:
            raise RequestError(
                504, f"{upstream.name} did not answer in {upstream.timeout_s:g} s", code="upstream_timeout"
            ) from error
        except (aiohttp.ClientError, OSError) as error:
            why = upstream.without_key(str(error).encode()).decode() or type(error).__name__
            raise RequestError(502, f"{upstream.name} failed: {why}", code="upstream_unavailable") from error


async def _relay(
    upstreams: Upstreams, passed: Passed, response: aiohttp.ClientResponse
) -> AsyncGenerator[Start | bytes, None]:
    clean, parts = passed.upstream.without_key, _parts(upstreams, passed, response)
    headers = {name: value for name, value in response.headers.items() if name.lower() in SENT_BACK}
    headers["x-interaction-id"] = passed.id
    if response.status >= 400:
        body = clean(b"".join([part async for part in parts]))
        await _fail(upstreams, passed, f"HTTP {response.status}: {body.decode(errors='replace')}")
        yield Start(status=response.status, headers=headers, body=body)
        return
    if response.status >= 300:
        raise RequestError(502, f"{passed.upstream.name} redirects: check its base_url", code="upstream_failed")
    started_at = time.time()
    if response.content_type != "text/event-stream":
        body = clean(b"".join([part async for part in parts]))
        try:
            answer = _storable(body)
            if not isinstance(answer, dict):
                raise ValueError("it is no object")
        except ValueError as error:
            why = f"{passed.upstream.name} answered no JSON: {error}"
            raise RequestError(502, why, code="upstream_failed") from error
        await _commit(upstreams, passed, answer, ending(answer), started_at, Spent().told(answer).tokens)
        yield Start(status=response.status, headers=headers, body=body)
        return
    start: Start | None = Start(status=response.status, headers=headers, body=None)
    events: list[Any] = []
    spent = Spent()
    held: list[bytes] = []
    reason = problem = None
    holding = False  # what closes a tool call or ends the answer leaves after the commit
    async with aclosing(split_events(parts)) as chunks:
        async for chunk in chunks:
            event = clean(chunk)
            data = data_of(event)
            if data is not None:
                events.append(data)
                spent.told(data)
            reason, problem = reason or ending(data), problem or error_of(data)
            if start is not None:
                yield start
                start = None
            holding = holding or bool(reason or problem) or calls_tool(data)
            if holding:
                held.append(event)
            else:
                yield event
            if is_last(data):
                break
    if problem is not None:
        await _fail(upstreams, passed, problem)
    elif reason is not None:
        await _commit(upstreams, passed, {"events": events}, reason, started_at, spent.tokens)
    else:
        raise RequestError(502, f"{passed.upstream.name} broke off", code="upstream_failed")
    yield b"".join(held)


async def _parts(upstreams: Upstreams, passed: Passed, response: aiohttp.ClientResponse) -> AsyncGenerator[bytes, None]:
    """The answer as it comes. Raises RequestError 502 for one that is longer than a request may be."""
    size = 0
    async for part in response.content.iter_any():
        size += len(part)
        if size > upstreams.max_answer_bytes:
            why = f"{passed.upstream.name} answered more than {upstreams.max_answer_bytes} bytes"
            raise RequestError(502, why, code="upstream_failed")
        yield part


async def split_events(chunks: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    """The events of a server-sent stream byte for byte, however it is cut; what follows the last one, too."""
    buffer, scanned = b"", 0
    async for chunk in chunks:
        buffer += chunk
        start = 0
        for end in END_OF_EVENT.finditer(buffer, scanned):
            yield buffer[start : end.end()]
            start = end.end()
        buffer = buffer[start:]
        scanned = max(0, len(buffer) - 3)  # an end may straddle two chunks
    if buffer:
        yield buffer


def data_of(event: bytes) -> Any:
    """The payload of an event: JSON where it is that, else text; None where there is none."""
    lines = [line[5:].removeprefix(b" ") for line in event.splitlines() if line.startswith(b"data:")]
    if not lines:
        return None
    data = b"\n".join(lines)
    try:
        return _storable(data)
    except ValueError:
        return data.decode(errors="replace")


def ending(data: Any) -> str | None:
    """The finish reason that a whole answer, or the event that ends a streamed one, has in any dialect."""
    match data:
        case {"choices": [*choices]}:
            reasons = [choice.get("finish_reason") for choice in choices if isinstance(choice, dict)]
        case {"stop_reason": reason} | {"delta": {"stop_reason": reason}}:
            reasons = [reason]
        case {"response": {"status": status}} | {"object": "response", "status": status}:
            reasons = [status if status in ("completed", "incomplete", "cancelled") else None]
        case _:
            return "stop" if is_last(data) else None
    return next((reason for reason in reasons if isinstance(reason, str)), None)


def calls_tool(data: Any) -> bool:
    """Whether an event of a stream begins a tool call, or goes on with one, in any dialect."""
    match data:
        case {"choices": [*choices]}:
            deltas = [choice.get("delta") for choice in choices if isinstance(choice, dict)]
            return any(isinstance(delta, dict) and bool(delta.get("tool_calls")) for delta in deltas)
        case {"type": "content_block_start", "content_block": {"type": "tool_use"}}:
            return True
        case {"type": "response.output_item.added", "item": {"type": "function_call" | "custom_tool_call"}}:
            return True
    return False


def error_of(data: Any) -> str | None:
    """What went wrong, in an event that says so."""
    match data:
        case {"type": "error" | "response.failed"} | {"error": {}}:
            return orjson.dumps(data).decode()
    return None


def is_last(data: Any) -> bool:
    """Whether an event is the last of its stream in any dialect."""
    if isinstance(data, dict):
        return data.get("type") in ("message_stop", "response.completed", "response.incomplete", "response.failed")
    return bool(data == DONE)


def _headers(upstream: Upstream, path: str, said: Mapping[str, str]) -> dict[str, str]:
    headers = {name: said[name] for name in SENT_ON if name in said} | {"content-type": "application/json"}
    if upstream.key is not None and path.startswith("/messages"):
        headers["x-api-key"] = upstream.key
    elif upstream.key is not None:
        headers["authorization"] = f"Bearer {upstream.key}"
    return headers


def _intent(upstreams: Upstreams, origin: CallOrigin, passed: Passed, asked: Json) -> call_intents.Intent:
    tools = asked.get("tools")
    rest = {name: value for name, value in asked.items() if name not in SHARED}
    return call_intents.Intent(
        id=passed.id,
        run_id=upstreams.context.store.run_id,
        session_id=passed.session_id,
        parent_id=None,
        dialect=origin.dialect.name,
        role=Role.UPSTREAM,
        digest=origin.digest,
        replica=upstreams.context.store.replica,
        params=rest,
        temperature=0.0,
        tools=None if tools is None else Content.of(tools),
        options={"upstream": passed.upstream.name, "model": passed.upstream.model},
        fork_reason=None,
        bridged=False,
        distribution_modified=False,
        trainable=False,
        prompt_tokens=0,
        prompt_digest=TokenIds().digest,
        created_at=time.time(),
    )


async def _commit(
    upstreams: Upstreams, passed: Passed, answer: Json, reason: str | None, first_token_at: float, tokens: int
) -> None:
    outcome = call_outcomes.Outcome(
        status=InteractionStatus.COMPLETE,
        conversation_key=b"",
        new_messages=_conversation(orjson.loads(passed.body)),
        answer=answer,
        prompt_delta_ids=[],
        output_ids=[],
        logprobs=[],
        spans=[],
        finish_reason=(reason or "stop")[:32],
        engine_url=passed.url,
        cached_tokens=None,
        first_token_at=first_token_at,
    )
    seq = await upstreams.context.store.write(
        session_usage.finish_upstream, passed.id, passed.session_id, outcome, tokens
    )
    upstreams.context.trees.commit(passed.session_id, seq, None)


async def _fail(upstreams: Upstreams, passed: Passed, error: str) -> None:
    await upstreams.context.store.write(running_calls.fail, passed.id, InteractionStatus.FAILED, error)


def _conversation(asked: Json) -> list[Json]:
    """What was said to the model, as messages."""
    said: Any = next((asked[name] for name in CONVERSATION if name in asked), [])
    if isinstance(said, list) and all(isinstance(message, dict) for message in said):
        return said
    return [{"role": "user", "content": said}]


def _storable(text: bytes) -> Any:
    """JSON that can be kept. Raises ValueError, also for what is nested too deeply to be written again."""
    value = orjson.loads(text)
    try:
        orjson.dumps(value)
    except TypeError as error:
        raise ValueError("it is nested too deeply") from error
    return value
