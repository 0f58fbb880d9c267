"""Samples one answer, across engine deaths and aborts. The caller sees one sequence of tokens.

    acquire an engine ──► stream a segment ──► next action
                               ▲                 ├─ FINISH    the answer is complete
                               │                 ├─ RESAMPLE  it cannot be continued exactly: raises Interrupted
                               └─────────────────┴─ CONTINUE  prompt + tokens so far, on the engine that serves next

A segment that a publish aborted, or whose engine died, is not the end of the answer. `sample_segment` records which
version sampled which tokens.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass
from enum import Enum, auto

from agentrl.domain.experts.routed_experts import RoutingShape
from agentrl.domain.schemas import Json
from agentrl.domain.tokens import TokenIds
from agentrl.engine.engine_client import EngineClient
from agentrl.errors import EngineError, EngineRejected, EngineUnavailable, RequestError
from agentrl.proxy.calls.sampling.engine_params import resumable
from agentrl.proxy.calls.sampling.routed_rows import RoutedRows
from agentrl.proxy.calls.sampling.sample_segment import Interrupted, Sampled, Segment
from agentrl.proxy.dialects.model_answer import Tokens
from agentrl.proxy.dialects.parameter_errors import ENGINE_REFUSED, translated
from agentrl.proxy.engines.engine_state import Engine, EngineState
from agentrl.proxy.engines.pool import EnginePool

log = logging.getLogger(__name__)
MAX_FRUITLESS = 8
"""How many segments in a row may end before their first token."""
MAX_DEATHS = 1
"""How many engines may die under a call before the call is suspected of killing them, and given up."""
WHOLE_INTERVAL = 256
"""Tokens per event of an answer that is not streamed; as many are lost when the engine dies."""
ABORT_TIMEOUT_S = 5.0
RETRY_AFTER_S = 5.0
NO_REASON = "it gives no reason"
BEHIND_DEADLINE_S = 0.1
"""How much later than the deadline the engine's own time-out is, so that the deadline is reported first."""


class Next(Enum):
    """The next action after a segment."""

    FINISH = auto()
    CONTINUE = auto()
    RESAMPLE = auto()


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleRequest:
    """A request to the engines: the arguments of `sample`."""

    session_id: str
    rid: str
    prompt_ids: TokenIds
    params: Json
    deadline: float
    own_seed: int | None = None
    top_logprobs: int = 0
    routing: RoutingShape | None = None  # record the experts of a model of this shape
    routed_from: int = 0  # from this position on
    whole: bool = False

    @property
    def engine_params(self) -> Json:
        """The sampling parameters that every segment has in common."""
        interval = {"stream_interval": WHOLE_INTERVAL} if self.whole else {}
        seed = {} if self.own_seed is None else {"sampling_seed": self.own_seed}
        return self.params | interval | seed

    @property
    def max_tokens(self) -> int:
        """Upper bound on the tokens of the answer."""
        limit: int = self.params["max_new_tokens"]
        return limit

    @property
    def is_late(self) -> bool:
        """Whether the deadline is over."""
        return time.monotonic() > self.deadline


async def sample(pool: EnginePool, sampled: Sampled, emit: Callable[[Tokens], None], request: SampleRequest) -> None:
    """Fill `sampled`, and `emit` the new tokens of each event.

    `request.params` are SGLang's sampling parameters, with `max_new_tokens`. `deadline` is in monotonic seconds. A
    `whole` answer comes in fewer events. An answer with `own_seed` can be continued: an engine draws each token from
    the seed and the token's place alone.

    Raises Interrupted when the answer cannot be continued exactly, and RequestError: 400 when the engine refuses the
    request, 502 when the engine fails it or too many engines died under it, 503 when no engine serves before the
    deadline or too many calls were sent again, 504 when the answer is not complete by the deadline. Errors name no
    engine; the log does.
    """
    fruitless = 0
    if request.routing is not None:
        sampled.routed = RoutedRows(request.routing, request.routed_from, len(request.prompt_ids))
    with pool.call():
        while fruitless < MAX_FRUITLESS:
            segment = await _begin(request, pool, sampled)
            await _stream(request, pool, segment, sampled, emit)
            match next_action(request, segment, sampled):
                case Next.FINISH:
                    return
                case Next.RESAMPLE:
                    raise Interrupted("an answer with a grammar, penalties or a seed cannot be continued")
                case Next.CONTINUE:
                    fruitless = fruitless + 1 if len(sampled.output_ids) == segment.start else 0
    raise Interrupted(f"the answer was interrupted {MAX_FRUITLESS} times in a row")


def next_action(request: SampleRequest, segment: Segment, sampled: Sampled) -> Next:
    """The next action after a segment. Sets the finish reason of an answer that the engine did not finish itself."""
    ids = sampled.output_ids
    if segment.ended and sampled.finish_reason != "abort":
        return Next.FINISH
    if ids and not resumable(request.params):
        return Next.RESAMPLE
    if len(ids) >= request.max_tokens:
        sampled.finish_reason = "length"
        return Next.FINISH
    if ids and ids[-1] in request.params.get("stop_token_ids", ()):
        sampled.finish_reason = "stop"
        return Next.FINISH
    return Next.CONTINUE


async def _begin(request: SampleRequest, pool: EnginePool, sampled: Sampled) -> Segment:
    """Acquire an engine for the rest of the answer. Raises RequestError 503."""
    try:
        engine = await pool.acquire(request.session_id, request.deadline)
    except EngineUnavailable as error:
        raise RequestError(503, str(error), code="engine_unavailable", retry_after_s=1.0) from error
    start = len(sampled.output_ids)
    sampled.sampled_by(engine)
    sampled.resumed = start > 0
    if sampled.routed is not None:
        sampled.routed.begin(start)
    known = engine.version if engine.state is EngineState.SERVING else None
    versions = set() if known is None else {known}
    return Segment(engine, start, sampled.spans, known, pool.updates.keeps_cache, versions)


async def _stream(
    request: SampleRequest, pool: EnginePool, segment: Segment, sampled: Sampled, emit: Callable[[Tokens], None]
) -> None:
    """Stream a segment to its end, or until its engine dies. Raises RequestError and Interrupted as `sample` does."""
    engine, name = segment.engine, pool.segment_id(request.rid)
    is_dead = False
    chunks = engine.client.generate(
        rid=name,
        input_ids=request.prompt_ids.extended(sampled.output_ids),
        sampling_params=request.engine_params | {"max_new_tokens": request.max_tokens - segment.start},
        routing_key=request.session_id,
        timeout_s=max(request.deadline - time.monotonic(), 0.0) + BEHIND_DEADLINE_S,
        top_logprobs=request.top_logprobs,
        adapter=engine.adapter,
        cache_key=segment.cache_key(name),
        experts_from=None if sampled.routed is None else sampled.routed.end,
    )
    try:
        async with aclosing(chunks):
            async for chunk in chunks:
                if not segment.checked:
                    await segment.check(chunk, pool)
                segment.read(chunk, sampled)
                if chunk.output_ids:
                    emit(Tokens(chunk.output_ids, chunk.logprobs, chunk.top_logprobs))
                if request.is_late:
                    raise _deadline_exceeded()
    except EngineRejected as error:
        log.info("call %s: %s refused it", request.rid, engine.url)
        message = f"{ENGINE_REFUSED}{error.engine_message or NO_REASON}"
        raise translated(RequestError(400, message, code="engine_rejected"), {}) from error
    except EngineUnavailable as error:
        is_dead = True
        if request.is_late:
            raise _deadline_exceeded() from error
        await _check_retry(pool, engine, request.rid, error)
        await segment.account(sampled, pool)
    except EngineError as error:
        # Only the type is logged: the message may quote the call.
        log.warning("call %s: %s failed it: %s", request.rid, engine.url, type(error).__name__)
        raise RequestError(502, "the engine failed", code="engine_error") from error
    finally:
        pool.release(engine)
        if not (segment.ended or is_dead):
            await _abort(engine.client, name)


async def _check_retry(pool: EnginePool, engine: Engine, rid: str, error: EngineError) -> None:
    """The engine died: raise RequestError unless the call may be sent to another engine."""
    if await pool.failed(engine, rid, error) > MAX_DEATHS:
        log.error("call %s is given up: %s", rid, error)
        message = f"{MAX_DEATHS + 1} engines died while they sampled this call"
        raise RequestError(502, message, code="engine_died") from error
    if not pool.budget.take(time.monotonic(), pool.calls):
        raise RequestError(
            503,
            "engines fail, and too many calls were sent again",
            code="engine_unavailable",
            retry_after_s=RETRY_AFTER_S,
        ) from error


def _deadline_exceeded() -> RequestError:
    return RequestError(504, "the answer was not finished in time", code="deadline_exceeded")


async def _abort(client: EngineClient, rid: str) -> None:
    """Stop the engine's work on `rid`. An engine that does not answer is ignored: it is dead."""
    try:
        async with asyncio.timeout(ABORT_TIMEOUT_S):
            await client.abort(rid)
    except (EngineError, TimeoutError) as error:
        log.info("abort of %s: %s", rid, error or "no answer in time")
