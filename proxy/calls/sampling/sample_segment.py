"""One segment of an answer: a request to an engine, and which weight version sampled each of its tokens.

An engine with early spans says with every event which version sampled which token, SGLang only with a segment's last
event: earlier ones name the version that the engine serves when it sends them. So the tokens of a segment that broke
off there are known to be of version v only if the engine served v when the request was sent and every event named v. A
segment that names an adapter is of the adapter's version as a whole.

Where updates keep the engines' caches (pause mode `in_place`), a request may reuse cache entries of its own version
only. A segment that newer weights continued has keys and values of older ones: `kv_mixed`.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

from agentrl.domain.schemas import VersionSpan
from agentrl.engine.chunks import Chunk
from agentrl.errors import EngineError, EngineUnavailable
from agentrl.proxy.calls.sampling.routed_rows import RoutedRows
from agentrl.proxy.dialects.model_answer import Tokens, TopLogprobs
from agentrl.proxy.engines.engine_state import Engine
from agentrl.proxy.engines.pool import EnginePool
from agentrl.store.calls.call_outcomes import EngineSpan

TIMED_STEPS = 8
"""Decode steps of a segment whose time is taken."""


class Interrupted(EngineError):
    """The answer broke off and cannot be continued exactly. It may be sampled again if nothing was delivered."""


@dataclass(slots=True)
class Sampled:
    """The answer so far. When a segment has ended, `spans` cover `output_ids`."""

    output_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    top: TopLogprobs | None = None  # as long as `output_ids`, where the call asks for them
    finish_reason: str | None = None
    cached_tokens: int | None = None
    first_token_at: float | None = None
    engines: list[EngineSpan] = field(default_factory=list)  # those that sampled it, in order
    kv_mixed: bool = False  # some tokens were sampled with keys and values that older weights computed
    routed: RoutedRows | None = None  # where the call asks for them
    resumed: bool = False  # a later segment continued it, with the tokens so far as prompt

    @property
    def engine_url(self) -> str | None:
        """The engine that samples it, or sampled its last token."""
        return self.engines[-1][0] if self.engines else None

    def sampled_by(self, engine: Engine) -> None:
        """The engine samples what comes now. One before it that sampled nothing does not count."""
        start = len(self.output_ids)
        self.engines = [span for span in self.engines if span[2] < start]
        if not self.engines or self.engines[-1][0] != engine.url:
            self.engines.append((engine.url, engine.backend, start))

    @property
    def tokens(self) -> Tokens:
        """The sampled tokens so far."""
        return Tokens(self.output_ids, self.logprobs, self.top)

    def keep(self, count: int) -> None:
        """Keep the first `count` tokens, as if the engine had stopped there."""
        if count == len(self.output_ids):
            return
        for values in (self.output_ids, self.logprobs, self.top or []):
            del values[count:]
        self.spans = [replace(span, end=min(span.end, count)) for span in self.spans if span.start < count]
        self.engines = [span for span in self.engines if span[2] < count] or self.engines[:1]
        self.finish_reason = "stop"


@dataclass(slots=True)
class Segment:
    """One request to an engine, and its state while it runs."""

    engine: Engine
    start: int  # how many tokens of the answer came before it
    before: list[VersionSpan]  # their spans
    version: int | None  # the version that the engine served when the request was sent
    keeps_cache: bool = False  # after an update the engine continues with the keys and values of older weights
    versions: set[int] = field(default_factory=set)  # every version that computed part of it
    n_known: int = 0  # tokens known to be sampled by `version`
    checked: bool = False
    ended: bool = False  # the engine sent its last event
    first_at: float | None = None  # when its first tokens came (monotonic)
    n_first: int = 0  # how many tokens the answer had then

    def cache_key(self, name: str) -> str | None:
        """The cache namespace of the request: that of its version, or the new `name` where the version is unknown.

        A request that reaches the engine after an update may still hit entries of the older version; `versions` records
        that.
        """
        if not self.keeps_cache:
            return None
        return name if self.version is None else f"v{self.version}"

    async def check(self, chunk: Chunk, pool: EnginePool) -> None:
        """Raises EngineUnavailable when the engine restarted with other weights than the run's."""
        if not chunk.output_ids:
            return
        self.checked = True
        label = chunk.version_label
        if label is not None and label != self.version and not await pool.serves_rightly(label):
            raise EngineUnavailable(f"{self.engine.url} serves version {label}: it has restarted")

    def read(self, chunk: Chunk, sampled: Sampled) -> None:
        """Append a chunk to the answer."""
        if chunk.output_ids and sampled.first_token_at is None:
            sampled.first_token_at = time.time()
        if self.start == 0:  # an engine may say it with its first event or with its last
            sampled.cached_tokens = max(sampled.cached_tokens or 0, chunk.cached_tokens)
        sampled.output_ids += chunk.output_ids
        sampled.logprobs += chunk.logprobs
        if chunk.top_logprobs is not None:
            sampled.top = sampled.top or []
            sampled.top += chunk.top_logprobs
        if chunk.version_label == self.version:  # otherwise the last event reports the versions
            self.n_known += len(chunk.output_ids)
        else:
            self.version = None
        if chunk.versions is not None:
            sampled.spans = extend_spans(self.before, self.start, chunk.versions)
            self.versions |= {span.version for span in chunk.versions}
            sampled.kv_mixed |= self.keeps_cache and len(self.versions) > 1
        if sampled.routed is not None:
            sampled.routed.read(chunk, len(sampled.output_ids))
        if chunk.output_ids and self.first_at is None:
            self.first_at, self.n_first = time.monotonic(), len(sampled.output_ids)
        if chunk.finish_reason is not None:
            self.ended = True
            sampled.finish_reason = chunk.finish_reason
            self._time_steps(len(sampled.output_ids))

    def _time_steps(self, n_tokens: int) -> None:
        """Tell the engine how long its decode steps were: each gave one token. A segment with an update is left out."""
        steps = n_tokens - self.n_first
        if self.first_at is not None and steps >= TIMED_STEPS and len(self.versions) <= 1:
            self.engine.saw_steps((time.monotonic() - self.first_at) / steps)

    async def account(self, sampled: Sampled, pool: EnginePool) -> None:
        """Attribute the tokens of a segment that broke off to a version. Raises Interrupted when it is not known."""
        n_tokens = len(sampled.output_ids) - self.start
        reported = sampled.spans[-1].end if sampled.spans else 0
        if n_tokens == 0 or reported == len(sampled.output_ids):
            return
        if self.version is None or self.n_known < n_tokens or not await pool.never_left(self.version):
            raise Interrupted("the engine died before it reported which weights sampled these tokens")
        span = VersionSpan(version=self.version, start=0, end=n_tokens)
        sampled.spans = extend_spans(self.before, self.start, [span])


def extend_spans(before: list[VersionSpan], start: int, spans: list[VersionSpan]) -> list[VersionSpan]:
    """`before`, then `spans` shifted by `start`; adjacent spans of one version become one."""
    merged = list(before)
    for span in spans:
        shifted = VersionSpan(version=span.version, start=span.start + start, end=span.end + start)
        if merged and merged[-1].version == shifted.version:
            merged[-1] = VersionSpan(version=shifted.version, start=merged[-1].start, end=shifted.end)
        else:
            merged.append(shifted)
    return merged
