"""Records a call of the policy in the store: its intent before it is sampled, its outcome after."""

from __future__ import annotations

import asyncio
import logging
import time

from agentrl.domain.schemas import InteractionStatus, Json
from agentrl.errors import EngineError, RequestError
from agentrl.proxy.access.heavy_work import INLINE_BYTES
from agentrl.proxy.calls.call_context import CallContext
from agentrl.proxy.calls.pending_call import Call, CallOrigin
from agentrl.proxy.calls.sampling.engine_params import is_greedy, modifies_distribution, replaced
from agentrl.proxy.calls.sampling.routed_rows import RoutedRows
from agentrl.proxy.calls.sampling.sample_segment import Sampled
from agentrl.proxy.dialects.model_answer import Answer
from agentrl.proxy.dialects.model_request import ModelRequest, Named
from agentrl.rendering.conversation import chain_key
from agentrl.rendering.divergence import textless
from agentrl.store.calls import call_intents, call_outcomes, call_routing, policy_calls, response_records
from agentrl.store.calls.call_tree import Node
from agentrl.store.sessions.ends import roles

log = logging.getLogger(__name__)


def intent_of(context: CallContext, origin: CallOrigin, call: Call, first: Call) -> call_intents.Intent:
    """The intent row of a call; `first` is the first call of its request."""
    request, prompt = call.request, call.prompt
    modified = modifies_distribution(call.params)
    return call_intents.Intent(
        id=call.id,
        run_id=context.store.run_id,
        session_id=call.session_id,
        parent_id=prompt.parent.id if prompt.parent is not None else None,
        dialect=origin.dialect.name,
        role=prompt.role,
        digest=origin.digest,
        replica=context.store.replica,
        params=call.recorded_params,
        temperature=call.params["temperature"],
        system=prompt.system,
        tools=prompt.tools,
        options=_options(origin, request, call),
        request_id=first.id if request.choices > 1 else None,
        repeat_key=origin.repeat_key if call is first else None,
        messages=prompt.messages + 1,
        fork_reason=prompt.fork_reason,
        bridged=prompt.parent is not None,
        distribution_modified=modified,
        trainable=call.trainable and not (modified or is_greedy(call.params)),
        prompt_tokens=len(prompt.token_ids),
        prompt_digest=prompt.token_ids.digest,
        created_at=call.created_at,
    )


def _options(origin: CallOrigin, request: ModelRequest, call: Call) -> Json | None:
    """The request's options besides messages, tools and sampling parameters; None if it has none."""
    choice = request.tool_choice
    asked: Json = {
        "client": origin.client,
        "replaced": replaced(request, call.params) or None,
        "choice": call.choice if request.choices > 1 else None,
        "tool_choice": None if choice == "auto" else {"name": choice.name} if isinstance(choice, Named) else choice,
        "parallel_tool_calls": None if request.parallel_tool_calls else False,
        "left_out": request.left_out or None,
        "previous_id": request.previous_id,
        "has_instructions": request.has_instructions or None,
        "retry": origin.retry or None,
        policy_calls.STORE: None if origin.trains else False,
        roles.SAID: origin.role,
        response_records.ASKED: request.kept,
    }
    return {name: value for name, value in asked.items() if value is not None} or None


async def _routing(call_id: str, rows: RoutedRows, tokens: int) -> Json:
    """The experts of a call's positions as a row, made in a thread where they are many. Raises RequestError 502 for
    garbage.
    """

    def packed() -> Json:
        return call_routing.row(call_id, rows.finished(tokens))

    try:
        return packed() if rows.size < INLINE_BYTES else await asyncio.to_thread(packed)
    except EngineError as error:
        log.warning("%s", error)
        raise RequestError(502, "the engine failed", code="engine_error") from error


async def commit(context: CallContext, call: Call, sampled: Sampled, answer: Answer) -> None:
    """Record the answer, and add the call to its session's token tree. Raises RequestError, StoreError."""
    prompt = call.prompt
    key, textless_key = chain_key(prompt.chain, answer.message), None
    text = answer.message.get("content") if answer.message.get("tool_calls") else None
    if text and context.settings.restore_dropped_text:
        textless_key = chain_key(prompt.chain, textless(answer.message))
    routing = None if sampled.routed is None else await _routing(call.id, sampled.routed, len(sampled.output_ids))
    outcome = call_outcomes.Outcome(
        status=InteractionStatus.COMPLETE,
        conversation_key=key,
        new_messages=prompt.new_messages,
        answer=answer.message,
        prompt_delta_ids=prompt.delta_ids,
        output_ids=sampled.output_ids,
        logprobs=sampled.logprobs,
        spans=sampled.spans,
        finish_reason=answer.finish_reason,
        engine_url=sampled.engine_url,
        engine_backend=sampled.engines[-1][1] if sampled.engines else None,
        engine_spans=sampled.engines if len(sampled.engines) > 1 else None,
        cached_tokens=sampled.cached_tokens,
        first_token_at=sampled.first_token_at,
        top_logprobs=sampled.top,
        routing=routing,
        kv_mixed=sampled.kv_mixed,
        textless_key=textless_key,
    )
    at = time.perf_counter()
    seq = await context.store.write(call_outcomes.finish, call.id, call.session_id, outcome)
    context.metrics.stage("finish", at)
    context.metrics.answered(
        prompt_tokens=len(prompt.token_ids),
        cached_tokens=sampled.cached_tokens or 0,
        output_tokens=len(sampled.output_ids),
        fork_reason=prompt.fork_reason,
        bridged=prompt.parent is not None,
    )
    node = Node(
        id=call.id,
        conversation_key=key,
        parent=prompt.parent,
        ids=prompt.token_ids.extended(sampled.output_ids),
        n_delta=len(prompt.delta_ids),
        role=prompt.role,
        system_hash=prompt.system.hash if prompt.system is not None else None,
        tools_hash=prompt.tools.hash if prompt.tools is not None else None,
        messages=prompt.messages + 1,
        textless_key=textless_key,
        text=None if textless_key is None else text,
    )
    context.trees.commit(call.session_id, seq, node)
