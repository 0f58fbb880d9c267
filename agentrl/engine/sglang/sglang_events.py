"""Parses SGLang's event stream into chunks of new tokens. Performs no I/O."""

from __future__ import annotations

from typing import Any, TypeVar

from agentrl.domain.schemas import Json, VersionSpan
from agentrl.engine.chunks import BASE, WITHOUT_WEIGHTS, Adapter, Chunk, parse_version
from agentrl.engine.control.control_requests import LONGEST_ENGINE_MESSAGE
from agentrl.errors import EngineError, EngineRejected, EngineUnavailable

T = TypeVar("T")
NO_TOKEN = "Grammar accept_token failed"
"""SGLang's server error for a grammar that accepts no token."""
FINISH_REASONS = frozenset({"stop", "length", "abort"})


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
