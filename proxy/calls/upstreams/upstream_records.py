"""The rows of a call to an upstream: its intent, its answer, its failure."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import orjson

from agentrl.domain.schemas import InteractionStatus, Json, Role
from agentrl.domain.tokens import TokenIds
from agentrl.proxy.calls.call_context import CallContext
from agentrl.proxy.calls.pending_call import CallOrigin
from agentrl.proxy.calls.upstreams.upstream_models import Upstream
from agentrl.proxy.dialects.dialect import Dialect
from agentrl.store.calls import call_intents, call_outcomes, running_calls
from agentrl.store.db.codec import Content
from agentrl.store.sessions import session_usage

CONVERSATION = ("messages", "input", "prompt")
SHARED = ("model", "tools", *CONVERSATION)
"""Parts of a request that are stored apart from its parameters."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UpstreamCall:
    """A call as it is sent to its upstream."""

    id: str
    session_id: str
    dialect: Dialect
    upstream: Upstream
    url: str
    headers: dict[str, str]
    body: bytes


def params_of(fields: Json) -> Json:
    """The fields of a request's body that are stored as its parameters."""
    return {name: value for name, value in fields.items() if name not in SHARED}


async def begin(context: CallContext, origin: CallOrigin, call: UpstreamCall, fields: Json) -> None:
    """Make the intent durable. `fields` is the body as the client sent it. Raises StoreError."""
    context.serving.add(call.id)
    try:
        await context.store.write(call_intents.begin, _intent(context, origin, call, fields))
    except BaseException:  # the row may exist nevertheless: the sweep finds it
        context.serving.discard(call.id)
        raise


async def commit(
    context: CallContext, call: UpstreamCall, answer: Json, reason: str | None, first_token_at: float, tokens: int
) -> None:
    """Record the answer, and charge its output `tokens` to the session. Raises StoreError."""
    outcome = call_outcomes.Outcome(
        status=InteractionStatus.COMPLETE,
        conversation_key=b"",
        new_messages=_conversation(orjson.loads(call.body)),
        answer=answer,
        prompt_delta_ids=[],
        output_ids=[],
        logprobs=[],
        spans=[],
        finish_reason=(reason or "stop")[:32],
        engine_url=call.url,
        cached_tokens=None,
        first_token_at=first_token_at,
    )
    seq = await context.store.write(session_usage.finish_upstream, call.id, call.session_id, outcome, tokens)
    context.trees.commit(call.session_id, seq, None)


async def fail(context: CallContext, call: UpstreamCall, error: str) -> None:
    """Record that the upstream reported an error. Raises StoreError."""
    await context.store.write(running_calls.fail, call.id, InteractionStatus.FAILED, error)


def _intent(context: CallContext, origin: CallOrigin, call: UpstreamCall, fields: Json) -> call_intents.Intent:
    tools = fields.get("tools")
    return call_intents.Intent(
        id=call.id,
        run_id=context.store.run_id,
        session_id=call.session_id,
        parent_id=None,
        dialect=origin.dialect.name,
        role=Role.UPSTREAM,
        digest=origin.digest,
        replica=context.store.replica,
        params=params_of(fields),
        temperature=0.0,
        tools=None if tools is None else Content.of(tools),
        options={"upstream": call.upstream.name, "model": call.upstream.model},
        fork_reason=None,
        bridged=False,
        distribution_modified=False,
        trainable=False,
        prompt_tokens=0,
        prompt_digest=TokenIds().digest,
        created_at=time.time(),
    )


def _conversation(fields: Json) -> list[Json]:
    """The conversation of a request as a list of messages."""
    given: Any = next((fields[name] for name in CONVERSATION if name in fields), [])
    if isinstance(given, list) and all(isinstance(message, dict) for message in given):
        return given
    return [{"role": "user", "content": given}]
