"""Replies of the fake engine: what a test scripts, and the events that SGLang would send for it. Without I/O."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, Literal

from agentrl.domain.experts.routed_experts import RoutingShape
from agentrl.domain.schemas import Json
from agentrl.testing.fake_routing import as_reported, chosen_experts

END_OF_TURN = 2
Respond = Callable[[list[int], Json], Sequence[int]]
Score = Callable[[list[int]], Sequence[float]]
Omission = Literal["output_ids", "output_token_logprobs", "weight_versions", "finish_reason", "routed_experts"]


@dataclass(frozen=True, slots=True)
class Reply:
    """One scripted reply of `/generate`."""

    ids: Sequence[int] = ()
    logprobs: Sequence[float] | None = None  # as long as ids; by default -1/8, -2/8, …
    chunks: Sequence[int] | None = None  # how many tokens each event brings; by default by `stream_interval`, or one
    finish_reason: str | None = None  # by default `length` if max_new_tokens cut the ids, else `stop`
    matched_stop: int | str | None = None  # by default the last id
    versions: Sequence[int] | None = None  # of each token; by default the version served when it is sent
    hold_after: int | None = None  # wait for `FakeEngine.release` after this many tokens
    drop_after: int | None = None  # cut the connection after this many tokens
    delay_s: float = 0.0  # before each event
    status: int | None = None  # answer with this HTTP status instead
    error: str | None = None  # the message beside `status`, or of an error event in the stream
    cached_tokens: int = 0  # prompt tokens that the prefix cache is said to have had
    routed_experts: str | None = None  # report these experts in place of the engine's
    omit: frozenset[Omission] = field(default_factory=frozenset)  # fields to leave out, as a faulty engine would


def fixed_answer(input_ids: list[int], sampling_params: Json) -> list[int]:
    """Three tokens that depend on the prompt alone, then the end of the turn."""
    base = sum((i + 1) * token for i, token in enumerate(input_ids))
    return [3 + (base + 7 * i) % 200 for i in range(3)] + [END_OF_TURN]


def fixed_scores(input_ids: list[int]) -> list[float]:
    """A logprob of each token that depends on it and on the number of those before it; the first has none."""
    return [-((7 * token + i) % 32 + 1) / 16 for i, token in enumerate(input_ids)]


def scored(body: Json, logprobs: Sequence[float], text_of: Callable[[int], str]) -> Json:
    """The answer to a request that samples nothing: logprobs of the prompt's tokens from `logprob_start_len` on, of
    which the first has none.
    """
    ids, start = body["input_ids"], body["logprob_start_len"]
    texts = [text_of(token) if body.get("return_text_in_logprobs") else None for token in ids]
    rows = [[None if i == start else logprobs[i], ids[i], texts[i]] for i in range(start, len(ids))]
    meta = {"prompt_tokens": len(ids), "completion_tokens": 0, "finish_reason": {"type": "length", "length": 0}}
    return {"text": "", "output_ids": [], "meta_info": meta | {"input_token_logprobs": rows}}


class RunningReply:
    """A reply that is being streamed: the tokens sent so far, and the weight version that sampled each."""

    def __init__(self, reply: Reply, body: Json, *, cumulative: bool, routing: RoutingShape | None = None) -> None:
        limit = body["sampling_params"].get("max_new_tokens", 128)
        self.reply = reply
        self.body = body
        self.cumulative = cumulative
        self.ids = list(reply.ids)[:limit]
        self.cut = len(reply.ids) > limit or reply.finish_reason == "length"
        self.logprobs = list(reply.logprobs or [-(i + 1) / 8 for i in range(len(self.ids))])
        self.token_versions: list[int | str] = []
        self.retractions = 0
        self._routing = routing
        self._computed_by: list[int | str] = []  # the version that computed each position
        self._retractions_seen = 0

    @property
    def n_sent(self) -> int:
        return len(self.token_versions)

    @property
    def spans(self) -> list[Json]:
        """The weight versions of the tokens sent so far."""
        return spans_of([str(v) for v in (self.reply.versions or self.token_versions)[: self.n_sent]])

    def steps(self) -> Sequence[int]:
        """Tokens of each event; events begin exactly at `hold_after` and `drop_after`."""
        if self.reply.chunks is not None:
            borders = set(accumulate(self.reply.chunks))
        else:
            interval = self.body["sampling_params"].get("stream_interval") or 1
            borders = set(range(1, len(self.ids), interval))  # the first token has its own event
        borders.add(len(self.ids))
        borders |= {n for n in (self.reply.hold_after, self.reply.drop_after) if n is not None}
        ends = sorted(b for b in borders if 0 < b <= len(self.ids))
        steps = [end - start for start, end in pairwise([0, *ends])]
        at_end = len(self.ids) in (self.reply.hold_after, self.reply.drop_after)
        return [*steps, 0] if at_end or not steps else steps

    def event(self, n_tokens: int, version: int | str, *, aborted: bool) -> Json:
        start = 0 if self.cumulative else self.n_sent
        self.token_versions += [version] * n_tokens
        self._compute(n_tokens, version)
        n, omit = self.n_sent, self.reply.omit
        holds_back = len(self.ids) in (self.reply.hold_after, self.reply.drop_after) and n_tokens > 0
        done = aborted or (n == len(self.ids) and not holds_back)
        meta: Json = {
            "id": self.body["rid"],
            "prompt_tokens": len(self.body["input_ids"]),
            "completion_tokens": n,
            "cached_tokens": self.reply.cached_tokens,
            "num_retractions": self.retractions,
            "weight_version": str(version),
            "finish_reason": self._finish_reason(aborted) if done and "finish_reason" not in omit else None,
            "output_token_logprobs": [[self.logprobs[i], self.ids[i], None] for i in range(start, n)],
        }
        if top := self.body.get("top_logprobs_num"):
            meta["output_top_logprobs"] = [self._likeliest(i, top) for i in range(start, n)]
        if done:
            meta["weight_versions"] = self.spans or [{"version": str(version), "start": 0, "end": 0}]
            if (experts := self._experts()) is not None:
                meta["routed_experts"] = experts
        event: Json = {"text": "", "output_ids": self.ids[start:n], "meta_info": meta}
        for name in omit - {"finish_reason"}:
            event.pop(name, None)
            meta.pop(name, None)
        return event

    def repeat_last(self, event: Json) -> None:
        """Repeat the last token in `event`, as SGLang does in the last event of a request that is aborted while it is
        retracted.
        """
        if not self.cumulative and self.n_sent:
            event["output_ids"] = [self.ids[self.n_sent - 1]]
            whole = [[self.logprobs[i], self.ids[i], None] for i in range(self.n_sent)]
            event["meta_info"]["output_token_logprobs"] = whole

    def _compute(self, n_tokens: int, version: int | str) -> None:
        """Compute the positions that sampling `n_tokens` needs, and after a retraction all earlier ones again."""
        if n_tokens:
            if self.retractions > self._retractions_seen:
                self._computed_by = [version] * len(self._computed_by)
                self._retractions_seen = self.retractions
            new = len(self.body["input_ids"]) + self.n_sent - 1 - len(self._computed_by)
            self._computed_by += [version] * new

    def _experts(self) -> str | None:
        """The experts of all positions from the requested one on, as far as they have been computed."""
        if self.reply.routed_experts is not None:
            return self.reply.routed_experts
        waits = self.retractions > self._retractions_seen or not self.n_sent
        if self._routing is None or not self.body.get("return_routed_experts") or waits:
            return None
        first = self.body.get("routed_experts_start_len", 0)
        tokens = [*self.body["input_ids"], *self.ids][first : len(self._computed_by)]
        versions = [int(version) for version in self._computed_by[first:]]
        return as_reported(chosen_experts(tokens, versions, self._routing, first))

    def _likeliest(self, at: int, count: int) -> list[Any]:
        """The sampled token and the ids that follow it, each one nat less likely at temperature 1."""
        temperature = self.body["sampling_params"].get("temperature") or 1
        return [[self.logprobs[at] - k / temperature, self.ids[at] + k, None] for k in range(count)]

    def _finish_reason(self, aborted: bool) -> Json:
        kind = "abort" if aborted else self.reply.finish_reason or ("length" if self.cut else "stop")
        if kind != "stop":
            return {"type": kind}
        matched = self.reply.matched_stop
        return {"type": "stop", "matched": self.ids[-1] if matched is None and self.ids else matched}


def spans_of(labels: Sequence[str]) -> list[Json]:
    """["0", "0", "1"] → [{"version": "0", "start": 0, "end": 2}, {"version": "1", "start": 2, "end": 3}]."""
    starts = [i for i, label in enumerate(labels) if i == 0 or label != labels[i - 1]]
    return [{"version": labels[s], "start": s, "end": e} for s, e in pairwise([*starts, len(labels)])]
