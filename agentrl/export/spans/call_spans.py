"""The span of a model call: `chat MODEL`, a child of its session's span."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanKind

from agentrl.domain.schemas import InteractionStatus, Json, Role
from agentrl.export.spans import genai_names as names
from agentrl.export.spans.message_texts import answers, instructions, messages
from agentrl.export.spans.session_spans import TracedRun
from agentrl.export.spans.span_parts import context, make_span, numbers
from agentrl.store import family
from agentrl.store.exports.trace_rows import TracedCall, TracedSession
from agentrl.store.sessions.areal_sessions import RESPONSE_IDS

PARAMS = {
    names.REQUEST_TOP_P: ("top_p",),
    names.REQUEST_TOP_K: ("top_k",),
    names.REQUEST_MAX_TOKENS: ("max_new_tokens", "max_completion_tokens", "max_output_tokens", "max_tokens"),
    names.REQUEST_SEED: ("sampling_seed", "seed"),
    names.REQUEST_STREAM: ("stream",),
    names.REQUEST_CHOICES: ("n",),
}
"""Attribute → the parameters that it may come from: the engine's, then those of calls to other models."""
INTEGERS = {names.REQUEST_TOP_K, names.REQUEST_MAX_TOKENS, names.REQUEST_SEED, names.REQUEST_CHOICES}


def call_span(run: TracedRun, session: TracedSession, call: TracedCall) -> ReadableSpan:
    """The span of a call of an ended session."""
    row, root_id = call.row, family.root_of(session.row)
    upstream = row.role == Role.UPSTREAM
    options = row.options or {}
    model = str(options.get("model") or run.name) if upstream else run.name
    operation = names.TEXT_COMPLETION if row.dialect == "openai.completions" else names.CHAT
    failed = row.status != InteractionStatus.COMPLETE
    ended_at = row.finished_at or session.row.ended_at or row.created_at  # a lost call has no end of its own
    return make_span(
        f"{operation} {model}",
        context(root_id, row.id),
        context(root_id, session.row.id),
        kind=SpanKind.CLIENT,
        times=(row.created_at, ended_at),
        attributes={
            names.OPERATION: operation,
            names.PROVIDER: _provider(row.dialect) if upstream else row.engine_backend or run.provider,
            names.CONVERSATION: root_id,
            names.REQUEST_MODEL: model,
            names.ERROR_TYPE: row.status if failed else None,
            **_request(row, upstream=upstream),
            **_response(row, model, upstream=upstream),
            **_server(row.engine_url),
            **_lineage(row),
            **numbers("agentrl.reward.", session.rewards.get(row.id, {})),
            **(_contents(call, run.content_bytes) if run.content_bytes is not None else {}),
        },
        error=(row.error or row.status) if failed else None,
        resource=run.resource,
    )


def _provider(dialect: str) -> str:
    """The provider whose API another model's server speaks."""
    return dialect.split(".")[0]


def _request(row: Any, *, upstream: bool) -> Json:
    params: Json = row.params
    found = {name: next((params[key] for key in keys if key in params), None) for name, keys in PARAMS.items()}
    found[names.REQUEST_TEMPERATURE] = params.get("temperature") if upstream else row.temperature
    numeric = {name: value for name, value in found.items() if isinstance(value, int | float)}
    return {
        name: value if name in INTEGERS | {names.REQUEST_STREAM} else float(value) for name, value in numeric.items()
    }


def _response(row: Any, model: str, *, upstream: bool) -> Json:
    waited_s = None if row.first_token_at is None else max(0.0, row.first_token_at - row.created_at)
    done = row.status == InteractionStatus.COMPLETE
    return {
        names.RESPONSE_ID: RESPONSE_IDS.get(row.dialect, "") + row.id if done else None,
        names.RESPONSE_MODEL: model if done else None,
        names.FINISH_REASONS: None if row.finish_reason is None else [row.finish_reason],
        names.TIME_TO_FIRST_CHUNK: waited_s,
        names.INPUT_TOKENS: None if upstream else row.prompt_tokens,
        names.OUTPUT_TOKENS: row.upstream_tokens if upstream else row.output_tokens,
        names.CACHE_READ_TOKENS: row.cached_tokens,
    }


def _server(url: str | None) -> Json:
    try:
        parts = urlsplit(url or "")
        return {names.SERVER_ADDRESS: parts.hostname, names.SERVER_PORT: parts.port}
    except ValueError:  # a port that is no number
        return {}


def _lineage(row: Any) -> Json:
    return {
        "agentrl.call.id": row.id,
        "agentrl.call.parent_id": row.parent_id,
        "agentrl.call.role": row.role,
        "agentrl.call.status": row.status,
        "agentrl.session.id": row.session_id,
        "agentrl.dialect": row.dialect,
        "agentrl.fork_reason": row.fork_reason,
        "agentrl.bridged": row.bridged,
        "agentrl.trainable": row.trainable,
        "agentrl.distribution_modified": row.distribution_modified,
        "agentrl.kv_mixed": row.kv_mixed,
        "agentrl.weight_version.min": row.min_version,
        "agentrl.weight_version.max": row.max_version,
    }


def _contents(call: TracedCall, size: int) -> Json:
    """The system messages, the messages after those of the parent call, and the answer."""
    return {
        names.SYSTEM_INSTRUCTIONS: instructions(call.system, size),
        names.INPUT_MESSAGES: messages(call.new_messages or [], size),
        names.OUTPUT_MESSAGES: messages(answers(call.answer), size, call.row.finish_reason or ""),
    }
