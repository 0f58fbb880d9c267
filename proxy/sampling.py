"""Sampling one answer, across engine deaths and aborts: the caller sees one stream of pieces.

A segment that ends without its own end (the engine died, a publish aborted it) is continued by prompt + tokens so far
on whichever engine serves next. The version spans say who sampled what.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field, replace

from agentrl.engine.client import EngineClient
from agentrl.errors import EngineError, EngineRejected, EngineUnavailable, RequestError
from agentrl.proxy.dialects.base import Tokens, TopLogprobs
from agentrl.proxy.engine_params import resumable
from agentrl.proxy.pool import EnginePool, EngineState
from agentrl.schemas import Json, VersionSpan

log = logging.getLogger(__name__)
MAX_SEGMENTS = 8
BEHIND_DEADLINE_S = 0.1  # an engine that times out has no say in whether the deadline is over


class Interrupted(EngineError):
    """The answer broke off and cannot be continued exactly: sample it anew, if nothing of it was delivered."""


@dataclass(slots=True)
class Sampled:
    """The answer so far. `spans` cover `output_ids` whenever the stream has ended."""

    output_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    top: TopLogprobs | None = None  # as long as `output_ids`, when they were asked for
    finish_reason: str | None = None
    cached_tokens: int | None = None
    first_token_at: float | None = None
    engine_url: str = ""
    resumed: bool = False  # by another request, which knows what came before as a prompt

    @property
    def tokens(self) -> Tokens:
        """The sampled tokens so far."""
        return Tokens(self.output_ids, self.logprobs, self.top)

    def keep(self, count: int) -> None:
        """Forget what came behind the first `count` tokens, as if the engine had stopped there."""
        if count == len(self.output_ids):
            return
        for values in (self.output_ids, self.logprobs, self.top or []):
            del values[count:]
        self.spans = [replace(span, end=min(span.end, count)) for span in self.spans if span.start < count]
        self.finish_reason = "stop"


async def sample(
    pool: EnginePool,
    sampled: Sampled,
    *,
    session_id: str,
    rid: str,
    prompt_ids: list[int],
    params: Json,
    deadline: float,
    top_logprobs: int = 0,
) -> AsyncGenerator[Tokens, None]:
    """Fill `sampled`, yielding the new tokens of each event. `params` are SGLang's, with `max_new_tokens`.

    Raises RequestError: 400 when the engine refuses the request, 503 when no engine serves before `deadline`
    (monotonic seconds), 504 when the answer is not whole by then, 502 when the engine fails it. Raises Interrupted when
    it cannot be continued exactly.
    """
    for segment in range(MAX_SEGMENTS):
        try:
            engine = await pool.acquire(session_id, deadline)
        except EngineUnavailable as error:
            raise RequestError(503, str(error), code="engine_unavailable", retry_after_s=1.0) from error
        sampled.engine_url = engine.url
        start, before = len(sampled.output_ids), sampled.spans
        sampled.resumed = start > 0
        budget = params["max_new_tokens"] - start
        left_s = max(deadline - time.monotonic(), 0.0)
        # The engine matches rids by prefix: all of them have one length, and a segment has its own.
        segment_rid = f"{rid}-{segment:02d}"
        finished = False
        try:
            async for chunk in engine.client.generate(
                rid=segment_rid,
                input_ids=prompt_ids + sampled.output_ids,
                sampling_params=params | {"max_new_tokens": budget},
                routing_key=session_id,
                timeout_s=left_s + BEHIND_DEADLINE_S,
                top_logprobs=top_logprobs,
            ):
                if chunk.output_ids and sampled.first_token_at is None:
                    sampled.first_token_at = time.time()
                if sampled.cached_tokens is None:
                    sampled.cached_tokens = chunk.cached_tokens
                sampled.output_ids += chunk.output_ids
                sampled.logprobs += chunk.logprobs
                if chunk.top_logprobs is not None:
                    sampled.top = sampled.top or []
                    sampled.top += chunk.top_logprobs
                if chunk.versions is not None:
                    sampled.spans = _extend(before, start, chunk.versions)
                if chunk.finish_reason is not None:
                    sampled.finish_reason = chunk.finish_reason
                    finished = chunk.finish_reason != "abort"
                if chunk.output_ids:
                    yield Tokens(chunk.output_ids, chunk.logprobs, chunk.top_logprobs)
                if time.monotonic() > deadline:
                    raise _late()
        except EngineRejected as error:
            raise RequestError(400, f"the engine refused the request: {error}", code="engine_rejected") from error
        except EngineUnavailable as error:
            if time.monotonic() > deadline:
                raise _late() from error
            await pool.set_state(engine, EngineState.DEAD, error=str(error))
        except EngineError as error:
            raise RequestError(502, f"the engine failed: {error}", code="engine_error") from error
        finally:
            pool.release(engine)
            if not finished:
                await _abort(engine.client, segment_rid)
        if finished:
            return
        if sampled.output_ids and not resumable(params):
            raise Interrupted("an answer with a grammar, penalties or a seed cannot be continued by another request")
        covered = sampled.spans[-1].end if sampled.spans else 0
        if covered < len(sampled.output_ids):
            raise Interrupted("the engine died before it said which weights sampled these tokens")
        if len(sampled.output_ids) >= params["max_new_tokens"]:
            sampled.finish_reason = "length"
            return
    raise Interrupted(f"the answer was interrupted {MAX_SEGMENTS} times")


def _late() -> RequestError:
    return RequestError(504, "the answer was not finished in time", code="deadline_exceeded")


def _extend(before: list[VersionSpan], start: int, spans: list[VersionSpan]) -> list[VersionSpan]:
    """`before` and the spans of the segment that began at `start`; neighbours of one version become one span."""
    merged = list(before)
    for span in spans:
        shifted = VersionSpan(version=span.version, start=span.start + start, end=span.end + start)
        if merged and merged[-1].version == shifted.version:
            merged[-1] = VersionSpan(version=shifted.version, start=merged[-1].start, end=shifted.end)
        else:
            merged.append(shifted)
    return merged


async def _abort(client: EngineClient, rid: str) -> None:
    """Free what the engine still computes for `rid`; an engine that is gone computes nothing."""
    try:
        await client.abort(rid)
    except EngineError as error:
        log.info("abort of %s: %s", rid, error)
