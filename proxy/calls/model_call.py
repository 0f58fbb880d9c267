"""One model call, from the decoded request to the committed answer.

    request ─► prompt (bridged or forked) ─► intent rows ─► sample ─► parse ─► tell of pieces as they are generated
                                                              └► commit ─► tell of the pieces that close tool calls

A request is one call for every answer it asks for (`n`, raw prompts): siblings in the token tree. Nothing that closes
a tool call or ends the response leaves before the commit. A call does not depend on its client: `exchanges` runs it,
and stops it when nobody wants its answer any more; what it had sampled is then not delivered and never trained.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace

from agentrl.domain.schemas import InteractionStatus, Json, Role
from agentrl.errors import RequestError, StoreError
from agentrl.proxy.access.request_bounds import check_options
from agentrl.proxy.calls.call_context import CallContext
from agentrl.proxy.calls.prompts.request_prompts import Prompt, parser_after, prompts_for
from agentrl.proxy.calls.sampling.engine_params import engine_params, is_greedy, modifies_distribution, replaced
from agentrl.proxy.calls.sampling.sample_segment import Interrupted, Sampled
from agentrl.proxy.calls.sampling.sampling import SampleRequest, sample
from agentrl.proxy.calls.sampling.stop_strings import Delivered
from agentrl.proxy.dialects.dialect import Answer, Dialect, Head, ModelRequest, Named, Piece, Tokens, message_of
from agentrl.proxy.dialects.model_names import is_policy
from agentrl.rendering import Delta, ToolCallDelta
from agentrl.rendering.conversation import chain_key
from agentrl.rendering.divergence import textless
from agentrl.store.calls import call_intents, call_outcomes, deliveries, policy_calls, response_records, running_calls
from agentrl.store.calls.call_tree import Node
from agentrl.store.db.codec import new_id
from agentrl.store.sessions.ends import roles

log = logging.getLogger(__name__)
Tell = Callable[[Piece | Answer], None]
GONE = "its client went away"


@dataclass(frozen=True, kw_only=True, slots=True)
class CallOrigin:
    """What is known of a model call besides its body: its session and what its headers say."""

    session_id: str
    dialect: Dialect
    digest: str  # of the request: finds retries
    role: Role | None = None  # x-turn-type
    retry: int = 0  # x-stainless-retry-count
    repeat_key: str | None = None  # hash of its Idempotency-Key
    trains: bool = True  # false: it asked to be left out
    client: str | None = None  # what it calls itself


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One answer that a request asks for."""

    id: str
    session_id: str
    request: ModelRequest
    prompt: Prompt
    params: Json
    choice: int  # its place among the request's answers
    created_at: float  # seconds since the epoch, of the request
    trainable: bool  # as far as its session is concerned
    own_seed: int | None = None  # the run's, for this call; null where its program gave one, or engines use none

    @property
    def recorded_params(self) -> Json:
        """The parameters, with the run's seed."""
        return self.params | ({} if self.own_seed is None else {"sampling_seed": self.own_seed})


async def prepare(context: CallContext, origin: CallOrigin, request: ModelRequest) -> tuple[Head, list[Call]]:
    """Render the prompts and check what is asked for. Raises RequestError."""
    at = time.perf_counter()
    session = await context.sessions.get(origin.session_id)
    _check_model(context, request.model)
    if request.previous_id is not None:
        request = await _continued(context, origin.session_id, request)
    prompts = await prompts_for(context, origin.session_id, request, origin.role)
    created_at = time.time()
    context.metrics.stage("render", at)
    calls: list[Call] = []
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
                own_seed=own_seed,
            )
        )
    return head_of(context, request, calls[0].id, created_at, sum(len(prompt.token_ids) for prompt in prompts)), calls


def head_of(context: CallContext, request: ModelRequest, first_id: str, created_at: float, prompt_tokens: int) -> Head:
    """What is known about a response when its first answer begins."""
    return Head(
        id=first_id,
        created=int(created_at),
        model=request.model or context.store.run_name,
        prompt_tokens=prompt_tokens,
        max_context=context.renderer.max_context,
        decode=context.renderer.decode,
    )


async def begin(context: CallContext, origin: CallOrigin, calls: Sequence[Call]) -> list[str]:
    """Make the intents durable: from now on this process answers for the calls.

    With an `Idempotency-Key` that an earlier request had, nothing begins: returns that one's calls.
    Raises RequestError.
    """
    at = time.perf_counter()
    intents = [_intent(context, origin, call, first=calls[0]) for call in calls]
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
    except BaseException:  # the rows may be there all the same: the sweep finds them
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


def _intent(context: CallContext, origin: CallOrigin, call: Call, first: Call) -> call_intents.Intent:
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
    """What was asked for beyond messages, tools and sampling parameters; None for nothing."""
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


async def _continued(context: CallContext, session_id: str, request: ModelRequest) -> ModelRequest:
    """A request after the conversation of an earlier response, whose instructions do not carry over."""
    assert request.previous_id is not None
    found = await context.store.read(response_records.find, session_id, request.previous_id)
    if found is None:
        raise RequestError(
            400,
            f"session {session_id} has no response 'resp_{request.previous_id}' to go on with",
            code="previous_response_not_found",
            param="previous_response_id",
        )
    before = found.all[1:] if found.options.get("has_instructions") else found.all
    instructions = request.messages[: int(request.has_instructions)]
    return replace(request, messages=[*instructions, *before, *request.messages[len(instructions) :]])


async def run(context: CallContext, call: Call, tell: Tell) -> None:
    """Sample the call and `tell` of it: pieces as they are generated; after the commit the last ones and the Answer.

    A origin that does not stream is told of the Answer alone, and an answer that broke off is sampled anew for it.
    Raises RequestError; the intent row then says why. Cancelling it aborts the call. Where the row cannot be closed
    now, the sweep closes it, because it is no longer in `context.serving`.
    """
    deadline = time.monotonic() + context.settings.request_timeout_s
    began = time.perf_counter()
    async with closing(context, call.id):
        while True:
            attempt = Attempt(context, call, tell)
            try:
                await attempt.sample(deadline)
                break
            except Interrupted as error:
                if attempt.told:
                    raise RequestError(502, str(error), code="engine_died") from error
        context.metrics.stage("sampling", began)
        answer = attempt.answer()
        await _commit(context, call, attempt.sampled, answer)
    if call.request.stream and attempt.late:
        tell(Piece(attempt.late, Tokens([], [])))
    tell(answer)


@asynccontextmanager
async def closing(context: CallContext, call_id: str) -> AsyncIterator[None]:
    """Closes the intent row of a call that does not get to its commit. Raises RequestError for whatever went wrong."""
    try:
        yield
    except (asyncio.CancelledError, GeneratorExit):
        with suppress(StoreError):
            context.store.submit(running_calls.fail, call_id, InteractionStatus.ABORTED, GONE)
        context.metrics.ended("aborted")
        raise
    except Exception as error:  # whatever it is, the call is over, and the client and the store are told
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


class Attempt:
    """One try at sampling and parsing a call's answer."""

    def __init__(self, context: CallContext, call: Call, tell: Tell) -> None:
        self._context = context
        self._call = call
        self._tell = tell
        prompt = call.prompt
        n_opening = len(prompt.opening)
        before = prompt.token_ids[:-n_opening] if n_opening else prompt.token_ids
        self._parser = parser_after(context, call.request, before)
        self._delivered = Delivered(call.request.stop, one_call=not call.request.parallel_tool_calls)
        self._kept = 0  # how many sampled tokens belong to the answer
        self._began = time.perf_counter()
        self.sampled = Sampled()
        self.told = False  # of something that cannot be taken back
        self.late: list[Delta] = []  # from the first tool call on: they close in the client only after the commit

    async def sample(self, deadline: float) -> None:
        """Tell of what may be shown before the commit. Raises RequestError and Interrupted, as `sampling.sample`."""
        call = self._call
        self._push(call.prompt.opening, Tokens([], []))
        await sample(
            self._context.pool,
            self.sampled,
            self._take,
            SampleRequest(
                session_id=call.session_id,
                rid=call.id,
                prompt_ids=call.prompt.token_ids,
                params=call.params,
                own_seed=call.own_seed,
                deadline=deadline,
                top_logprobs=call.request.top_logprobs,
                whole=not call.request.stream,
            ),
        )

    def _take(self, tokens: Tokens) -> None:
        """Parse the tokens of an event, and tell a origin that streams."""
        if not self._kept:
            self._context.metrics.stage("first_token", self._began)
        for part in self._parts(tokens):
            if self._delivered.stop is not None and self.sampled.resumed:
                break  # the stop string began before the seam, so the engine did not see it
            piece = self._push(part.ids, part)
            self._kept += len(part.ids)
            if piece is not None and self._call.request.stream:
                self.told = True
                self._tell(piece)

    def answer(self) -> Answer:
        """The whole answer, once `pieces` has ended."""
        parsed = self._delivered.finish(self._parser.finish())
        self.late += parsed.deltas
        sampled, call = self.sampled, self._call
        sampled.keep(self._kept)
        reason = sampled.finish_reason or "stop"
        if self._delivered.stop is not None:  # the engine says `length` where the last token completes it
            reason = "stop"
        if reason == "stop" and parsed.tool_calls:
            reason = "tool_calls"
        return Answer(
            interaction_id=call.id,
            message=message_of(parsed),
            finish_reason=reason,
            stop=self._delivered.stop,
            prompt_ids=call.prompt.token_ids,
            cached_tokens=sampled.cached_tokens or 0,
            tokens=sampled.tokens,
            versions=[[s.version, s.start, s.end] for s in sampled.spans],
        )

    def _parts(self, tokens: Tokens) -> list[Tokens]:
        """What is parsed together: all of an event, but each token alone where the answer may end at any of them."""
        if not (self.sampled.resumed and self._call.request.stop):
            return [tokens]
        ids, logprobs, top = tokens.ids, tokens.logprobs, tokens.top
        return [Tokens(ids[i : i + 1], logprobs[i : i + 1], top and top[i : i + 1]) for i in range(len(ids))]

    def _push(self, ids: Sequence[int], tokens: Tokens) -> Piece | None:
        """Parse some ids; the piece that may be shown at once, if any."""
        deltas = self._delivered.push(self._parser.push(ids))
        tool_calls = (i for i, delta in enumerate(deltas) if isinstance(delta, ToolCallDelta))
        first_late = 0 if self.late else next(tool_calls, len(deltas))
        shown, late = deltas[:first_late], deltas[first_late:]
        self.late += late
        if shown or (self._call.request.logprobs and tokens.ids):
            return Piece(shown, tokens)
        return None


async def _commit(context: CallContext, call: Call, sampled: Sampled, answer: Answer) -> None:
    prompt = call.prompt
    key, textless_key = chain_key(prompt.chain, answer.message), None
    text = answer.message.get("content") if answer.message.get("tool_calls") else None
    if text and context.settings.restore_dropped_text:
        textless_key = chain_key(prompt.chain, textless(answer.message))
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
        cached_tokens=sampled.cached_tokens,
        first_token_at=sampled.first_token_at,
        top_logprobs=sampled.top,
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


def _check_model(context: CallContext, model: str | None) -> None:
    if model is not None and not is_policy(model, context.store.run_name, context.settings.model_aliases):
        raise RequestError(
            404,
            f"no model {model!r}: this proxy serves {context.store.run_name!r} (also as 'default', and by the names in "
            "proxy.model_aliases)",
            code="model_not_found",
            param="model",
        )
