"""One call of the policy, from the decoded request to the committed answer.

    request ─► prompts ─► intent rows ─► attempt: sample, parse ─► deltas, as they are generated
               (render)     (begin)        │                         (before the first tool call)
                                           └► commit ─► the deltas held back, the Answer

A request becomes one call for each answer that it requests (`n`, several raw prompts). These calls are siblings in the
token tree. No event that closes a tool call or ends the response is delivered before the commit. A call does not depend
on its client's connection: an `Exchange` runs it, and stops it once no client can claim its answer any more. The tokens
of a stopped call are neither delivered nor trained.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

from agentrl.domain.schemas import InteractionStatus
from agentrl.errors import RequestError, StoreError
from agentrl.proxy.access.request_bounds import check_options
from agentrl.proxy.calls import call_records
from agentrl.proxy.calls.call_attempt import Attempt, Emit
from agentrl.proxy.calls.call_context import CallContext
from agentrl.proxy.calls.pending_call import Call, CallOrigin
from agentrl.proxy.calls.prompts.request_prompts import prompts_for
from agentrl.proxy.calls.sampling.engine_params import engine_params
from agentrl.proxy.calls.sampling.sample_segment import Interrupted
from agentrl.proxy.dialects.model_answer import AnswerDelta, ResponseHeader, Tokens
from agentrl.proxy.dialects.model_names import is_policy
from agentrl.proxy.dialects.model_request import ModelRequest
from agentrl.store.calls import call_intents, deliveries, response_records, running_calls
from agentrl.store.db.codec import new_id

log = logging.getLogger(__name__)
GONE = "its client went away"


async def prepare(context: CallContext, origin: CallOrigin, request: ModelRequest) -> tuple[ResponseHeader, list[Call]]:
    """Render the prompts and check the parameters. Raises RequestError."""
    at = time.perf_counter()
    session = await context.sessions.get(origin.session_id)
    _check_model(context, request.model)
    if request.previous_id is not None:
        request = await _continued(context, origin.session_id, request)
    prompts = await prompts_for(context, origin.session_id, request, origin.role)
    created_at = time.time()
    context.metrics.stage("render", at)
    calls: list[Call] = []
    top_logprobs = max(request.top_logprobs, 0 if session.is_eval else context.settings.top_logprobs)
    for index in range(request.choices):
        prompt = prompts[index // request.n]
        params = engine_params(context, session, request, prompt, index)
        own_seed = None
        if context.seeds is not None and "sampling_seed" not in params:
            own_seed = await context.seeds.of(origin.session_id, prompt.token_ids.digest)
        calls.append(
            Call(
                id=new_id(),
                session_id=origin.session_id,
                request=request,
                prompt=prompt,
                params=params,
                choice=index,
                created_at=created_at,
                trainable=origin.trains and not session.is_eval,
                top_logprobs=top_logprobs,
                routing=None if session.is_eval else context.settings.routing,
                own_seed=own_seed,
            )
        )
    return response_header(
        context, request, calls[0].id, created_at, sum(len(prompt.token_ids) for prompt in prompts)
    ), calls


def response_header(
    context: CallContext, request: ModelRequest, first_id: str, created_at: float, prompt_tokens: int
) -> ResponseHeader:
    """The facts of a response that are known when its first answer begins."""
    return ResponseHeader(
        id=first_id,
        created=int(created_at),
        model=request.model or context.store.run_name,
        prompt_tokens=prompt_tokens,
        max_context=context.renderer.max_context,
        decode=context.renderer.decode,
    )


async def begin(context: CallContext, origin: CallOrigin, calls: Sequence[Call]) -> list[str]:
    """Make the intents durable: from now on this process is responsible for the calls.

    If an earlier request had the same `Idempotency-Key`, nothing begins: returns the calls of that request.
    Raises RequestError.
    """
    at = time.perf_counter()
    intents = [call_records.intent_of(context, origin, call, first=calls[0]) for call in calls]
    check_options(intents[0].options, intents[0].params)
    ids = {call.id for call in calls}
    context.serving.update(ids)
    try:
        if origin.repeat_key is not None:
            earlier = (await context.store.write(deliveries.begin_once, intents, origin.repeat_key)).ids
            if earlier:
                context.serving.difference_update(ids)
            return earlier
        if len(intents) == 1:
            await context.store.write(call_intents.begin, intents[0])
        else:
            await context.store.write(call_intents.begin_all, intents)
    except BaseException:  # the rows may have been written: the sweep closes them
        context.serving.difference_update(ids)
        raise
    context.metrics.stage("begin", at)
    return []


async def count_tokens(context: CallContext, session_id: str, request: ModelRequest) -> int:
    """How many tokens the prompt of a request would have. Records nothing. Raises RequestError."""
    await context.sessions.get(session_id)
    _check_model(context, request.model)
    (prompt,) = await prompts_for(context, session_id, request, None)
    return len(prompt.token_ids)


async def _continued(context: CallContext, session_id: str, request: ModelRequest) -> ModelRequest:
    """The request with the conversation of the response that it continues, except the earlier instructions."""
    assert request.previous_id is not None
    found = await context.store.read(response_records.find, session_id, request.previous_id)
    if found is None:
        raise RequestError(
            400,
            f"session {session_id} has no response 'resp_{request.previous_id}' to continue",
            code="previous_response_not_found",
            param="previous_response_id",
        )
    before = found.all[1:] if found.options.get("has_instructions") else found.all
    instructions = request.messages[: int(request.has_instructions)]
    return replace(request, messages=[*instructions, *before, *request.messages[len(instructions) :]])


async def run(context: CallContext, call: Call, emit: Emit) -> None:
    """Sample the call and `emit` its answer: deltas as they are generated; after the commit the rest.

    For a request that does not stream, only the Answer is emitted, and an answer that broke off is sampled again.
    Raises RequestError; the intent row then says why. Cancelling it aborts the call. A row that cannot be closed now is
    closed by the sweep, because its id is no longer in `context.serving`.
    """
    deadline = time.monotonic() + context.settings.request_timeout_s
    began = time.perf_counter()
    async with closing(context, call.id):
        while True:
            attempt = Attempt(context, call, emit)
            try:
                await attempt.sample(deadline)
                break
            except Interrupted as error:
                if attempt.emitted:
                    raise RequestError(502, str(error), code="engine_died") from error
        context.metrics.stage("sampling", began)
        answer = attempt.answer()
        await call_records.commit(context, call, attempt.sampled, answer)
    if call.request.stream and attempt.held_back:
        emit(AnswerDelta(attempt.held_back, Tokens([], [])))
    emit(answer)


@asynccontextmanager
async def closing(context: CallContext, call_id: str) -> AsyncIterator[None]:
    """Close the intent row of a call that does not reach its commit. Raises RequestError for every error."""
    try:
        yield
    except (asyncio.CancelledError, GeneratorExit):
        with suppress(StoreError):
            context.store.submit(running_calls.fail, call_id, InteractionStatus.ABORTED, GONE)
        context.metrics.ended("aborted")
        raise
    except Exception as error:  # a defect of the proxy too: client and store must learn of it
        if not isinstance(error, RequestError | StoreError | ValueError):
            log.exception("call %s failed", call_id)
        try:
            await context.store.write(running_calls.fail, call_id, InteractionStatus.FAILED, str(error))
        except StoreError as problem:
            log.error("call %s: %s", call_id, problem)
        context.metrics.ended("failed")
        if isinstance(error, RequestError):
            raise
        message = f"the answer was not recorded, so it is not delivered: {error}"
        status = 503 if isinstance(error, StoreError) else 500
        raise RequestError(status, message, code="not_recorded") from error
    finally:
        context.serving.discard(call_id)


def _check_model(context: CallContext, model: str | None) -> None:
    if model is not None and not is_policy(model, context.store.run_name, context.settings.model_aliases):
        raise RequestError(
            404,
            f"no model {model!r}: this proxy serves {context.store.run_name!r} (also as 'default', and by the names in "
            "proxy.model_aliases)",
            code="model_not_found",
            param="model",
        )
