"""One model call, from the request's bytes to the committed answer.

    decode → session → prompt (bridged or forked) → intent row → sample ──► text as it is generated
                                                               └► parse → commit ──► the events that end the answer

Nothing that closes a tool call or ends the response leaves before the commit. A client that goes away aborts the call;
what it had sampled is not delivered and never trained.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Row

from agentrl.errors import RequestError, StoreError
from agentrl.proxy.dialects.openai_chat import Answer, ChatRequest, message_of
from agentrl.proxy.sampling import Interrupted, Sampled, sample
from agentrl.proxy.state import ProxyState
from agentrl.proxy.stops import StopText
from agentrl.proxy.tree import Prompt, prompt_for
from agentrl.rendering import Delta, ToolCallDelta
from agentrl.rendering.conversation import chain_key
from agentrl.schemas import InteractionStatus, Json
from agentrl.store import interactions, sessions
from agentrl.store.codec import new_id
from agentrl.store.interactions import Node

log = logging.getLogger(__name__)
DIALECT = "openai.chat"
_NEUTRAL = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "frequency_penalty": 0.0, "presence_penalty": 0.0}


@dataclass(kw_only=True, slots=True)
class Call:
    """A call whose intent is recorded and whose answer is on its way."""

    id: str
    session_id: str
    request: ChatRequest
    prompt: Prompt
    params: Json
    created: int
    model: str

    @property
    def completion_id(self) -> str:
        """The id that the client sees."""
        return f"chatcmpl-{self.id}"


async def begin(
    state: ProxyState, session_id: str, body: bytes, request: ChatRequest, *, created: int, role: str
) -> Call:
    """Render the prompt, check it, and make the intent durable. Raises RequestError."""
    session = await _session(state, session_id)
    _check_model(state, request.model)
    prompt = await prompt_for(state.trees, state.renderer, session_id, request.messages, request.tools)
    temperature, params = _engine_params(state, session, request, len(prompt.token_ids))
    modified = any(params.get(name, neutral) != neutral for name, neutral in _NEUTRAL.items())
    call = Call(
        id=new_id(), session_id=session_id, request=request, prompt=prompt, params=params, created=created,
        model=request.model or state.run_name,
    )  # fmt: skip
    intent = interactions.Intent(
        id=call.id,
        run_id=state.run_id,
        session_id=session_id,
        parent_id=prompt.parent_id,
        dialect=DIALECT,
        role=role,
        digest=hashlib.blake2b(body, digest_size=16).hexdigest(),
        replica=state.replica,
        params=params,
        temperature=temperature,
        tools=request.tools,
        fork_reason=prompt.fork_reason,
        bridged=prompt.parent_id is not None,
        distribution_modified=modified,
        trainable=not (session.is_eval or modified or temperature == 0),
        prompt_ids=prompt.token_ids,
        created_at=time.time(),
    )
    state.serving.add(call.id)
    try:
        await state.write(interactions.begin, intent)
    except BaseException:  # the row may be there all the same: the sweep finds it
        state.serving.discard(call.id)
        raise
    return call


async def run(state: ProxyState, call: Call) -> AsyncGenerator[Delta | Answer, None]:
    """Sample the call: its deltas as they are generated, then, after the commit, the rest and the Answer.

    A caller that does not stream gets the Answer alone, and an answer that broke off is sampled anew for it.
    Raises RequestError; the intent row then says why. Closing the iterator early aborts the call. Where the row cannot
    be closed now, the sweep closes it, because it is no longer in `state.serving`.
    """
    deadline = time.monotonic() + state.request_timeout_s
    try:
        while True:
            attempt = Attempt(state, call, deadline)
            try:
                async with aclosing(attempt.deltas()) as deltas:
                    async for delta in deltas:
                        if call.request.stream:
                            yield delta
                break
            except Interrupted as error:
                if attempt.delivered:
                    raise RequestError(502, str(error), code="engine_died") from error
        answer = attempt.answer()
        await _commit(state, call, attempt.sampled, answer)
    except (asyncio.CancelledError, GeneratorExit):
        with suppress(StoreError):
            state.database.submit(interactions.fail, call.id, InteractionStatus.ABORTED, "the client went away")
        raise
    except Exception as error:  # whatever it is, the call is over, and the client and the store are told
        if not isinstance(error, RequestError | StoreError | ValueError):
            log.exception("call %s failed", call.id)
        try:
            await state.write(interactions.fail, call.id, InteractionStatus.FAILED, str(error))
        except StoreError as problem:
            log.error("call %s: %s", call.id, problem)
        if isinstance(error, RequestError):
            raise
        message = f"the answer was not recorded, so it is not delivered: {error}"
        raise RequestError(500, message, code="not_recorded") from error
    finally:
        state.serving.discard(call.id)
    if call.request.stream:
        for delta in attempt.late:
            yield delta
    yield answer


class Attempt:
    """One try at sampling and parsing a call's answer."""

    def __init__(self, state: ProxyState, call: Call, deadline: float) -> None:
        self._state = state
        self._call = call
        self._deadline = deadline
        self._parser = state.renderer.parser(call.request.tools, call.prompt.token_ids)
        self._stop = StopText(call.request.stop)
        self.sampled = Sampled()
        self.delivered = False
        self.late: list[Delta] = []  # from the first tool call on: they close in the client only after the commit

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        """What may be shown before the commit. Raises RequestError and Interrupted, as `sample` does."""
        pieces = sample(
            self._state.pool, self.sampled, session_id=self._call.session_id, rid=self._call.id,
            prompt_ids=self._call.prompt.token_ids, params=self._call.params, deadline=self._deadline,
        )  # fmt: skip
        async with aclosing(pieces):
            async for ids in pieces:
                for delta in self._stop.push(self._parser.push(ids)):
                    if self.late or isinstance(delta, ToolCallDelta):
                        self.late.append(delta)
                    else:
                        self.delivered = self._call.request.stream
                        yield delta

    def answer(self) -> Answer:
        """The whole answer, once `deltas` has ended."""
        parsed = self._stop.finish(self._parser.finish())
        self.late += parsed.deltas
        sampled, call = self.sampled, self._call
        message = message_of(parsed)
        reason = sampled.finish_reason or "stop"
        if reason == "stop" and parsed.tool_calls:
            reason = "tool_calls"
        texts = [self._state.renderer.decode([i]) for i in sampled.output_ids] if call.request.logprobs else None
        return Answer(
            completion_id=call.completion_id,
            model=call.model,
            created=call.created,
            message=message,
            finish_reason=reason,
            prompt_ids=call.prompt.token_ids,
            output_ids=sampled.output_ids,
            logprobs=sampled.logprobs,
            token_texts=texts,
            cached_tokens=sampled.cached_tokens,
            versions=[[s.version, s.start, s.end] for s in sampled.spans],
        )


async def _commit(state: ProxyState, call: Call, sampled: Sampled, answer: Answer) -> None:
    key = chain_key(call.prompt.chain, answer.message)
    outcome = interactions.Outcome(
        status=InteractionStatus.COMPLETE,
        conversation_key=key,
        new_messages=call.prompt.new_messages,
        answer=answer.message,
        prompt_delta_ids=call.prompt.delta_ids,
        output_ids=sampled.output_ids,
        logprobs=sampled.logprobs,
        spans=sampled.spans,
        finish_reason=answer.finish_reason,
        engine_url=sampled.engine_url,
        cached_tokens=sampled.cached_tokens,
        first_token_at=sampled.first_token_at,
    )
    seq = await state.write(interactions.finish, call.id, call.session_id, outcome)
    state.trees.commit(call.session_id, seq, Node(call.id, key, call.prompt.token_ids + sampled.output_ids))


async def _session(state: ProxyState, session_id: str) -> Row[Any]:
    """What never changes about a session. Whether it is still open, the intent row's transaction decides."""
    row = state.sessions.get(session_id)
    if row is None:
        row = await state.read(sessions.get, session_id)
        if row is None or row.run_id != state.run_id:
            raise RequestError(404, f"no session {session_id!r}", code="session_not_found")
        state.sessions[session_id] = row
    return row


def _check_model(state: ProxyState, model: str | None) -> None:
    if model not in (None, "default", state.run_name):
        raise RequestError(
            404, f"no model {model!r}: this proxy serves {state.run_name!r} (also as 'default')",
            code="model_not_found", param="model",
        )  # fmt: skip


def _engine_params(
    state: ProxyState, session: Row[Any], request: ChatRequest, prompt_tokens: int
) -> tuple[float, Json]:
    """(temperature, SGLang's sampling parameters). Raises RequestError 400 when the context cannot hold the call."""
    forced = (session.sampling or {}) if session.is_eval else state.sampling
    sampling = request.sampling | {k: v for k, v in forced.items() if k != "max_tokens"}
    temperature = float(sampling.get("temperature", 1.0))
    window = state.renderer.max_context
    room = (window or 1 << 30) - prompt_tokens
    wanted = [n for n in (request.max_tokens, forced.get("max_tokens")) if n is not None]
    if room < 1 or (request.max_tokens is not None and request.max_tokens > room):
        asked = f" and {request.max_tokens} new ones" if request.max_tokens is not None else ""
        raise RequestError(
            400, f"the model's context is {window} tokens; this call needs {prompt_tokens} prompt tokens{asked}",
            code="context_length_exceeded", param="messages",
        )  # fmt: skip
    params: Json = {
        "temperature": temperature,
        "max_new_tokens": min([*wanted, room]),
        "stop_token_ids": state.renderer.stop_token_ids,
        "skip_special_tokens": False,
    }
    params |= {k: v for k, v in sampling.items() if k != "temperature"}
    if request.stop:
        params["stop"] = request.stop
    return temperature, params
