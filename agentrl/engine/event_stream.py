"""Parses SGLang's event stream into chunks of new tokens. Performs no I/O."""

from __future__ import annotations

import binascii
from dataclasses import dataclass
from typing import Any, TypeVar

from agentrl.domain.schemas import Json, VersionSpan
from agentrl.errors import EngineError, EngineRejected, EngineUnavailable

T = TypeVar("T")
BASE = 0
"""The version of base weights. A server also reports it while it samples with an adapter."""
WITHOUT_WEIGHTS = ("released", "reloading")
"""The labels of a server whose weights are undefined. It is paused: no token is sampled under them."""
NO_TOKEN = "Grammar accept_token failed"
"""SGLang's server error for a grammar that accepts no token."""
LONGEST_ENGINE_MESSAGE = 500
"""Maximum characters of an engine's message to pass on."""
PIECE = 1 << 18
"""Characters of base64 that are decoded at once; a multiple of 4."""
FINISH_REASONS = frozenset({"stop", "length", "abort"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """New tokens of one response. `output_ids` and `logprobs` share one length, which may be 0."""

    output_ids: list[int]
    logprobs: list[float]  # of the temperature-scaled distribution
    finish_reason: str | None = None  # stop | length | abort; on the last chunk only
    matched_stop: int | str | None = None  # the token id or string that ended the output
    versions: list[VersionSpan] | None = None  # over all output tokens so far; None until the engine reports them
    version_label: int | None = None
    """The version that the engine reported with this chunk. Tokens sampled before a weight update may be sent after it,
    so this is an upper bound; `versions` is exact.
    """
    top_logprobs: list[list[tuple[float, int]]] | None = None  # (logprob, id) of the most likely tokens, per output id
    cached_tokens: int = 0  # prompt tokens that came from the prefix cache
    retractions: int = 0  # how often the engine has put the request back into its queue, and computed it again
    routed_experts: str | None = None  # rows of `EngineClient.generate`, see `unpacked_experts`; on the last chunk only


@dataclass(frozen=True, slots=True)
class Adapter:
    """A version's low-rank adapter on a server, used with the base weights."""

    name: str  # unique per set of weights
    version: int


class ChunkReader:
    """Parses the events of one response in order, from a server that streams increments or cumulative outputs.

    Tokens of a request with an `adapter` have its version, as long as the server has base weights.
    """

    def __init__(self, adapter: Adapter | None = None) -> None:
        self._adapter = adapter
        self._n_read = 0  # output tokens seen so far

    def read(self, event: Json) -> Chunk:
        """Parse the next chunk. Raises EngineRejected or EngineError for an error event or missing fields.

        Raises EngineUnavailable for a version that is not the run's.
        """
        if "error" in event:
            raise _stream_error(event["error"])
        try:
            meta = event["meta_info"]
            ids: list[int] = event["output_ids"]
            triples: list[tuple[float, int, Any]] = meta["output_token_logprobs"]
            total: int = meta["completion_tokens"]
            reason: Json | None = meta["finish_reason"]
            rows: list[Any] | None = meta.get("output_top_logprobs")
            experts: str | None = meta.get("routed_experts")
        except (KeyError, TypeError) as error:
            raise EngineError(f"the engine's answer lacks {error}: it cannot be recorded") from error
        if reason is not None:
            _check_reason(reason)  # first, since a rejected request has no valid tokens
        n_new = total - self._n_read
        if reason is not None and reason["type"] == "abort" and len(triples) == n_new + total > len(ids) == n_new + 1:
            # The tokens that were not sent before the abort come first, then SGLang's echo: the last id, all logprobs
            # again.
            ids, triples, rows = ids[:n_new], triples[:n_new], rows and rows[:n_new]
        ids, triples = _newest(ids, n_new, total), _newest(triples, n_new, total)
        if [triple[1] for triple in triples] != ids:
            raise EngineError("the engine's logprobs belong to other tokens than its output ids")
        self._n_read = total
        kind = None if reason is None else reason["type"]
        versions = _spans(meta.get("weight_versions"), total, required=reason is not None)
        label = _label(meta.get("weight_version"))
        if self._adapter is not None:
            _check_base(label, versions)
            label = self._adapter.version
            versions = versions and [VersionSpan(version=label, start=0, end=total)]
        return Chunk(
            output_ids=ids,
            logprobs=[triple[0] for triple in triples],
            finish_reason=kind,
            matched_stop=None if reason is None else reason.get("matched"),
            versions=versions,
            version_label=label,
            top_logprobs=_top(rows, n_new, total),
            cached_tokens=meta.get("cached_tokens", 0),
            retractions=meta.get("num_retractions") or 0,
            routed_experts=None if reason is None else experts,
        )


def _newest(items: list[T], n_new: int, total: int) -> list[T]:
    """The last `n_new` items of an increment (exactly those) or of a cumulative list (`total` items)."""
    if n_new == 0:  # SGLang repeats the last token in the event that ends a request aborted while it waited
        return []
    if n_new < 0 or len(items) not in (n_new, total):
        raise EngineError(f"the engine sent {len(items)} tokens, expected {n_new} new ones of {total}")
    return items[len(items) - n_new :]


def _top(rows: list[Any] | None, n_new: int, total: int) -> list[list[tuple[float, int]]] | None:
    """The most likely tokens of each new position; None unless requested."""
    if rows is None:
        return None
    return [[(entry[0], entry[1]) for entry in row or ()] for row in _newest(rows, n_new, total)]


def unpacked_experts(experts: str) -> bytes:
    """The int32 rows of `Chunk.routed_experts`. Raises EngineError for anything but base64.

    Other threads may run between its pieces: a prompt of 8,000 tokens may have 16 MB.
    """
    try:
        pieces = (experts[at : at + PIECE] for at in range(0, len(experts), PIECE))
        return b"".join([binascii.a2b_base64(piece, strict_mode=True) for piece in pieces])
    except (ValueError, TypeError) as error:
        raise EngineError(f"the engine's routed experts are not base64: {error}") from error


def _check_reason(reason: Json) -> None:
    if reason["type"] not in FINISH_REASONS:
        raise EngineError(f"unknown finish reason {reason['type']!r}")
    if reason["type"] == "abort" and reason.get("status_code") is not None:  # refused by the scheduler, not stopped
        raise _stream_error({"message": reason.get("message"), "code": reason["status_code"]})


def _check_base(label: int | None, versions: list[VersionSpan] | None) -> None:
    """Raise EngineUnavailable when an adapter was used with weights other than the base."""
    found = {span.version for span in versions or ()} | {BASE if label is None else label}
    if found != {BASE}:
        raise EngineUnavailable(f"the engine serves version {max(found)} instead of the base weights of the adapters")


def _spans(raw: list[Json] | None, total: int, *, required: bool) -> list[VersionSpan] | None:
    """The version spans, checked to cover [0, total) without gap or overlap."""
    if raw is None:
        if required and total:
            raise EngineError("the engine reports no weight_versions: it is too old to train from")
        return [] if required else None
    spans = [
        VersionSpan(version=parse_version(s["version"]), start=s["start"], end=s["end"])
        for s in raw
        if s["start"] < s["end"]  # a request aborted before its first token has one empty span
    ]
    borders = [0, *(span.end for span in spans)]
    if borders[-1] != total or [span.start for span in spans] != borders[:-1]:
        raise EngineError(f"the engine's version spans {raw} do not cover its {total} tokens")
    return spans


def parse_version(label: str) -> int:
    """A version label as a number. Raises EngineError for other labels, such as SGLang's `default`."""
    if not str(label).isdecimal():
        raise EngineError(f"weight version {label!r} is not a number: launch the engine with --weight-version 0")
    return int(label)


def _label(label: str | None) -> int | None:
    """The version of an event; None if it has none, or was sampled before the server's memory was released."""
    try:
        return None if label is None or label in WITHOUT_WEIGHTS else parse_version(label)
    except EngineError as error:
        raise EngineUnavailable(str(error)) from error


def _stream_error(error: Any) -> EngineError:
    """Convert an error after the stream's 200 response, {"message", "code"}, to an EngineError."""
    message = error.get("message") if isinstance(error, dict) else error
    code = int(error.get("code") or 500) if isinstance(error, dict) else 500
    if NO_TOKEN in str(message):
        return EngineRejected(
            f"the engine refused the request: {message}", engine_message="its grammar accepts no further token"
        )
    kind = EngineRejected if 400 <= code < 500 else EngineError
    return kind(f"the engine refused the request: {message}", engine_message=str(message)[:LONGEST_ENGINE_MESSAGE])


class EventBuffer:
    """Splits a server-sent event stream into the payloads of its `data:` lines."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []  # of an event that is not complete: the last one, with routed experts, is large

    def feed(self, data: bytes) -> list[bytes]:
        """Return the payloads that `data`, which is not empty, completes."""
        straddles = bool(self._parts) and self._parts[-1].endswith(b"\n") and data.startswith(b"\n")
        self._parts.append(data)
        if not straddles and b"\n\n" not in data:
            return []
        *events, rest = b"".join(self._parts).split(b"\n\n")
        self._parts = [rest] if rest else []
        return [line[5:].strip() for event in events for line in event.split(b"\n") if line.startswith(b"data:")]
