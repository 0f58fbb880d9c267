"""Parses the events of vLLM's generate stream.

    event, event, …, event with a finish reason, usage, [DONE]  ──►  Chunk, Chunk, …, Chunk(finish_reason=…)

The last chunk waits for the usage, which says how many tokens of the prompt were cached. vLLM itself sends version
spans with the finish reason only; a server that agentrl started sends them with every event.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from agentrl.domain.schemas import Json, VersionSpan
from agentrl.engine.chunks import BASE, Adapter, Chunk, version_of_label
from agentrl.engine.control.control_requests import LONGEST_ENGINE_MESSAGE
from agentrl.errors import EngineDied, EngineError, EngineRejected, EngineUnavailable

FINISH_REASONS = frozenset({"stop", "length", "abort"})
NO_LOGPROB = -9999.0
"""vLLM's logprob of a token for which it has none, and in place of minus infinity and NaN."""
ENGINE_DEAD = "EngineCore encountered an issue"
"""vLLM's error when the process that computes has died."""
FAILED = "Internal server error"
"""vLLM's error of a request that it gave up alone: that of a grammar whose state allows no token that was sampled."""
TOO_LONG = ("maximum context length", "maximum model length")
NO_TOKEN = "its grammar accepts no further token"


class AnswerReader:
    """Parses the events of one answer in order. Tokens of a request with an `adapter` have its version, as long as the
    server has base weights. `bound` says that a grammar binds the answer.
    """

    def __init__(self, adapter: Adapter | None = None, *, bound: bool = False) -> None:
        self._adapter = adapter
        self._bound = bound
        self._n_read = 0
        self._last_id: int | None = None
        self._last: Chunk | None = None  # the chunk with the finish reason, until the usage comes

    def read(self, event: Json) -> Chunk | None:
        """Parse the next event; None for one that completes no chunk. Raises EngineRejected or EngineError for an error
        event or missing fields, EngineDied when the server's core has died.

        Raises EngineUnavailable for a version that is not the run's.
        """
        if "error" in event:
            raise _stream_error(event["error"], bound=self._bound)
        try:
            choices = event["choices"]
            if not choices:
                return self._ended(event.get("usage"))
            (choice,) = choices
            ids: list[int] = choice["token_ids"]
            content: list[Json] = choice["logprobs"]["content"]
            reason: str | None = choice["finish_reason"]
            raw: list[Json] | None = choice["weight_versions"]
            logprobs = [one["logprob"] for one in content]
            told = [one["token_id"] for one in content]
            top = [_likeliest(one["top_logprobs"]) for one in content]
        except (KeyError, TypeError, ValueError) as error:
            raise EngineError(f"the engine's answer lacks {error}: it cannot be recorded") from error
        if reason is not None and reason not in FINISH_REASONS:
            raise EngineError(f"unknown finish reason {reason!r}")
        if told != ids:
            raise EngineError("the engine's logprobs belong to other tokens than its output ids")
        if NO_LOGPROB in logprobs:
            raise self._without_logprob()
        self._n_read += len(ids)
        self._last_id = ids[-1] if ids else self._last_id
        versions = self._versions(raw, required=reason is not None)
        chunk = Chunk(
            output_ids=ids,
            logprobs=logprobs,
            finish_reason=reason,
            matched_stop=self._matched(choice.get("stop_reason")) if reason == "stop" else None,
            versions=versions,
            version_label=versions[-1].version if versions else None,
            top_logprobs=top if any(top) else None,
        )
        if reason is None:
            return chunk
        self._last = chunk
        return None

    def end(self) -> Chunk | None:
        """The last chunk, if it still waits for its usage."""
        return self._ended(None)

    def _ended(self, usage: Json | None) -> Chunk | None:
        last, self._last = self._last, None
        details = (usage or {}).get("prompt_tokens_details") or {}
        return last and replace(last, cached_tokens=details.get("cached_tokens") or 0)

    def _matched(self, stop: int | str | None) -> int | str | None:
        """What stopped the answer. vLLM does not name the model's own end token."""
        return self._last_id if stop is None else stop

    def _versions(self, raw: list[Json] | None, *, required: bool) -> list[VersionSpan] | None:
        """The version spans of all tokens so far, checked to cover them without gap or overlap."""
        if raw is None:
            if required and self._n_read:
                raise EngineError("the engine reports no weight_versions: it is too old to train from")
            return [] if required else None
        spans = [VersionSpan(version=_number(s["version"]), start=s["start"], end=s["end"]) for s in raw]
        spans = [span for span in spans if span.start < span.end]
        borders = [0, *(span.end for span in spans)]
        if borders[-1] != self._n_read or [span.start for span in spans] != borders[:-1]:
            raise EngineError(f"the engine's version spans {raw} do not cover its {self._n_read} tokens")
        if self._adapter is None or not spans:
            return spans
        if wrong := {span.version for span in spans} - {BASE}:
            raise EngineUnavailable(
                f"the engine serves version {max(wrong)} instead of the base weights of the adapters"
            )
        return [VersionSpan(version=self._adapter.version, start=0, end=self._n_read)]

    def _without_logprob(self) -> EngineError:
        if self._bound:
            return EngineRejected("the engine refused the request: " + NO_TOKEN, engine_message=NO_TOKEN)
        return EngineError("the engine sampled a token without a logprob: it cannot be recorded")


def _likeliest(entries: list[Json]) -> list[tuple[float, int]]:
    """The most likely tokens of a position. One more was asked for: vLLM counts the sampled token among them."""
    ranked = [entry for entry in entries if (entry["rank"] or 0) and entry["rank"] < len(entries)]
    return sorted(((entry["logprob"], entry["token_id"]) for entry in ranked), reverse=True)


def _number(label: str) -> int:
    version = version_of_label(label)
    if version is None:
        raise EngineUnavailable(
            f"weight version {label!r:.200} is not a number: the engine has restarted, or has not been told its version"
        )
    return version


def _stream_error(error: Any, *, bound: bool) -> EngineError:
    """Convert an error event, {"message", "code"}, to an exception."""
    message = str(error.get("message") if isinstance(error, dict) else error)
    code = int(error.get("code") or 500) if isinstance(error, dict) else 500
    if message.startswith(ENGINE_DEAD):
        return EngineDied(f"the engine's core has died: {message}")
    if bound and message == FAILED:
        return EngineRejected("the engine refused the request: " + NO_TOKEN, engine_message=NO_TOKEN)
    return refused(f"the engine refused the request: {message}", message, code, bound=bound)


def refused(text: str, message: str, status: int, *, bound: bool) -> EngineError:
    """The error of a request that vLLM refused or failed on, in the words that callers know."""
    if not 400 <= status < 500:
        return EngineError(text, engine_message=message[:LONGEST_ENGINE_MESSAGE])
    if any(part in message for part in TOO_LONG):
        why = "the prompt is longer than the engine's context"
    elif bound and "vocab" not in message:
        why = "its grammar was refused"
    else:
        return EngineRejected(text, engine_message=message[:LONGEST_ENGINE_MESSAGE], status=status)
    return EngineRejected(f"{text} ({why})", engine_message=f"{why}: {message}"[:LONGEST_ENGINE_MESSAGE], status=status)
