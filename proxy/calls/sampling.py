"""Sampling one answer, across engine deaths and aborts: whoever asks is told of one run of tokens.

A segment that ends without its own end (the engine died, a publish aborted it) is continued by prompt + tokens so far
on whichever engine serves next. The version spans say who sampled what. SGLang gives them with a segment's last event;
the events before name only the version that it serves as it sends them. So of a segment that broke off the tokens are
known to be of version v only if the engine served v when it was asked and named v in every event. A segment that names
an adapter is of the adapter's version from its first token to its last.

Where updates keep the engines' caches (pause mode `in_place`), a request uses only what the version that it was asked
under left in them. A segment that newer weights took part in has that much of its cache from older ones: `kv_mixed`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from agentrl.domain.schemas import Json, VersionSpan
from agentrl.domain.tokens import TokenIds
from agentrl.engine.sglang_client import Chunk, EngineClient
from agentrl.errors import EngineError, EngineRejected, EngineUnavailable, RequestError
from agentrl.proxy.calls.engine_params import resumable
from agentrl.proxy.dialects.dialect import ENGINE_REFUSED, Tokens, TopLogprobs, spoken
from agentrl.proxy.engines.engine_state import Engine, EngineState
from agentrl.proxy.engines.pool import EnginePool

log = logging.getLogger(__name__)
MAX_FRUITLESS = 8
"""Segments in a row that were aborted before their first token."""
MAX_DEATHS = 1
"""Of engines that a call was on, that it may be what killed them: the second one was its last."""
WHOLE_INTERVAL = 256
"""Tokens per event where nobody waits for the single ones: so many are lost when the engine dies."""
ABORT_TIMEOUT_S = 5.0
RETRY_AFTER_S = 5.0
NO_REASON = "it gives no reason"
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
    kv_mixed: bool = False  # some tokens were sampled over keys and values that older weights computed
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


@dataclass(slots=True)
class _Segment:
    """One request to an engine, and what of it is known while it runs."""

    engine: Engine
    start: int  # tokens of the answer before it
    before: list[VersionSpan]
    version: int | None  # what the engine served when it was asked
    keeps_cache: bool = False  # newer weights go on with what older ones computed
    versions: set[int] = field(default_factory=set)  # of the weights that took part
    n_known: int = 0  # tokens that were sampled by `version`
    checked: bool = False
    ended: bool = False  # by the engine

    def cache_key(self, name: str) -> str | None:
        """What the request finds in the engine's cache: what its version left there; where that is not known, nothing.

        One that comes to the engine behind an update after all may find what its version left, which `versions` tells.
        """
        if not self.keeps_cache:
            return None
        return name if self.version is None else f"v{self.version}"

    async def check(self, chunk: Chunk, pool: EnginePool) -> None:
        """Raises EngineUnavailable for an engine that has come back with other weights than the run's."""
        if not chunk.output_ids:
            return
        self.checked = True
        label = chunk.version_label
        if label is not None and label != self.version and not await pool.serves_rightly(label):
            raise EngineUnavailable(f"{self.engine.url} serves version {label}: it has restarted")

    def read(self, chunk: Chunk, sampled: Sampled) -> None:
        """Take a chunk over into the answer."""
        if chunk.output_ids and sampled.first_token_at is None:
            sampled.first_token_at = time.time()
        if sampled.cached_tokens is None:
            sampled.cached_tokens = chunk.cached_tokens
        sampled.output_ids += chunk.output_ids
        sampled.logprobs += chunk.logprobs
        if chunk.top_logprobs is not None:
            sampled.top = sampled.top or []
            sampled.top += chunk.top_logprobs
        if chunk.version_label == self.version:  # else not known before the last event, nor is what follows
            self.n_known += len(chunk.output_ids)
        else:
            self.version = None
        if chunk.versions is not None:
            sampled.spans = _extend(self.before, self.start, chunk.versions)
            self.versions |= {span.version for span in chunk.versions}
            sampled.kv_mixed |= self.keeps_cache and len(self.versions) > 1
        if chunk.finish_reason is not None:
            self.ended = True
            sampled.finish_reason = chunk.finish_reason

    async def account(self, sampled: Sampled, pool: EnginePool) -> None:
        """Say which weights sampled a segment that broke off. Raises Interrupted where that is not known."""
        n_tokens = len(sampled.output_ids) - self.start
        if n_tokens == 0:
            return
        if self.version is None or self.n_known < n_tokens or not await pool.never_left(self.version):
            raise Interrupted("the engine died before it said which weights sampled these tokens")
        span = VersionSpan(version=self.version, start=0, end=n_tokens)
        sampled.spans = _extend(self.before, self.start, [span])


async def sample(
    pool: EnginePool,
    sampled: Sampled,
    tell: Callable[[Tokens], None],
    *,
    session_id: str,
    rid: str,
    prompt_ids: TokenIds,
    params: Json,
    deadline: float,
    own_seed: int | None = None,
    top_logprobs: int = 0,
    whole: bool = False,
) -> None:
    """Fill `sampled`, and `tell` of the new tokens of each event. `params` are SGLang's, with `max_new_tokens`.

    A `whole` answer comes in fewer events. With `own_seed` an answer can still be continued: an engine draws a token
    from the seed and the token's place alone. Raises RequestError: 400 when the engine refuses the request, 503 when no
    engine serves before `deadline` (monotonic seconds) or too many calls were sent again, 504 when the answer is not
    whole by then, 502 when the engine fails it or too many engines died under it. Raises Interrupted when it cannot be
    continued exactly. What callers are told names no engine; the log does.
    """
    sent = params | ({"stream_interval": WHOLE_INTERVAL} if whole else {})
    if own_seed is not None:
        sent["sampling_seed"] = own_seed
    fruitless = 0
    with pool.call():
        while fruitless < MAX_FRUITLESS:
            segment = await _begin(pool, sampled, session_id, deadline)
            engine, name = segment.engine, pool.segment_id(rid)
            gone = False
            chunks = engine.client.generate(
                rid=name,
                input_ids=prompt_ids.extended(sampled.output_ids),
                sampling_params=sent | {"max_new_tokens": params["max_new_tokens"] - segment.start},
                routing_key=session_id,
                timeout_s=max(deadline - time.monotonic(), 0.0) + BEHIND_DEADLINE_S,
                top_logprobs=top_logprobs,
                adapter=engine.adapter,
                cache_key=segment.cache_key(name),
            )
            try:
                async with aclosing(chunks):
                    async for chunk in chunks:
                        if not segment.checked:
                            await segment.check(chunk, pool)
                        segment.read(chunk, sampled)
                        if chunk.output_ids:
                            tell(Tokens(chunk.output_ids, chunk.logprobs, chunk.top_logprobs))
                        if time.monotonic() > deadline:
                            raise _late()
            except EngineRejected as error:
                log.info("call %s: %s refused it", rid, engine.url)
                said = f"{ENGINE_REFUSED}{error.said or NO_REASON}"
                raise spoken(RequestError(400, said, code="engine_rejected"), {}) from error
            except EngineUnavailable as error:
                gone = True
                if time.monotonic() > deadline:
                    raise _late() from error
                await _may_go_on(pool, engine, rid, error)
                await segment.account(sampled, pool)
            except EngineError as error:
                log.warning("call %s: %s failed it: %s", rid, engine.url, type(error).__name__)  # which may quote it
                raise RequestError(502, "the engine failed", code="engine_error") from error
            finally:
                pool.release(engine)
                if not (segment.ended or gone):
                    await _abort(engine.client, name)
            if segment.ended and sampled.finish_reason != "abort":
                return
            if sampled.output_ids and not resumable(params):
                raise Interrupted("an answer with a grammar, penalties or a seed cannot be continued")
            if len(sampled.output_ids) >= params["max_new_tokens"]:
                sampled.finish_reason = "length"
                return
            if sampled.output_ids and sampled.output_ids[-1] in params.get("stop_token_ids", ()):
                sampled.finish_reason = "stop"
                return
            fruitless = fruitless + 1 if len(sampled.output_ids) == segment.start else 0
    raise Interrupted(f"the answer was interrupted {MAX_FRUITLESS} times in a row")


async def _begin(pool: EnginePool, sampled: Sampled, session_id: str, deadline: float) -> _Segment:
    """An engine for what is left of the answer. Raises RequestError 503."""
    try:
        engine = await pool.acquire(session_id, deadline)
    except EngineUnavailable as error:
        raise RequestError(503, str(error), code="engine_unavailable", retry_after_s=1.0) from error
    start = len(sampled.output_ids)
    sampled.engine_url = engine.url
    sampled.resumed = start > 0
    known = engine.version if engine.state is EngineState.SERVING else None
    versions = set() if known is None else {known}
    return _Segment(engine, start, sampled.spans, known, pool.updates.keeps_cache, versions)


async def _may_go_on(pool: EnginePool, engine: Engine, rid: str, error: EngineError) -> None:
    """The engine died; whether the call may be sent to another one. Raises RequestError."""
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
        async with asyncio.timeout(ABORT_TIMEOUT_S):
            await client.abort(rid)
    except (EngineError, TimeoutError) as error:
        log.info("abort of %s: %s", rid, error or "no answer in time")
