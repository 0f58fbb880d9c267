"""The span of a session, an `invoke_agent` operation: the root of its trace, or a child of its parent's span.

invoke_agent NAME              the session
├── chat MODEL                 each of its calls
└── invoke_agent NAME          each session of a sub-agent, with its own calls
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanKind

from agentrl.configs.metrics_config import TracesConfig
from agentrl.configs.run_config import RunConfig
from agentrl.domain.schemas import GONE, Json
from agentrl.export.spans import genai_names as names
from agentrl.export.spans.span_parts import context, make_span, numbers, text
from agentrl.store import family
from agentrl.store.exports.trace_rows import TracedSession
from agentrl.version import __version__


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedRun:
    """The facts of a run that its spans share, and whether they say what was said."""

    name: str
    agent: str
    provider: str  # of calls of the policy whose engine is not recorded
    resource: Resource
    content_bytes: int | None  # maximum size of an attribute with messages; None: send none

    @classmethod
    def of(cls, run: Any, settings: TracesConfig) -> Self:
        """The facts of a row of `runs`."""
        config = RunConfig.model_validate(run.config)
        resource = {"service.name": settings.service_name, "service.version": __version__}
        return cls(
            name=run.name,
            agent=config.agent if isinstance(config.agent, str) else run.name,
            provider=config.engine.backend,
            resource=Resource(resource | {"agentrl.run.id": run.id, "agentrl.run.name": run.name}),
            content_bytes=settings.max_content_bytes if settings.contents else None,
        )


def session_span(run: TracedRun, session: TracedSession) -> ReadableSpan:
    """The span of an ended session."""
    row = session.row
    root_id, parent_id = family.root_of(row), row.parent_session_id
    failed = row.status in GONE
    return make_span(
        f"{names.INVOKE_AGENT} {run.agent}",
        context(root_id, row.id),
        None if parent_id is None else context(root_id, parent_id),
        kind=SpanKind.INTERNAL,
        times=(row.created_at, row.created_at if row.ended_at is None else row.ended_at),
        attributes={
            names.OPERATION: names.INVOKE_AGENT,
            names.AGENT: run.agent,
            names.CONVERSATION: root_id,
            names.ERROR_TYPE: row.status if failed else None,
            **_place(row),
            **_outcome(run, session),
        },
        error=(row.error or row.status) if failed else None,
        resource=run.resource,
    )


def _place(row: Any) -> Json:
    return {
        "agentrl.session.id": row.id,
        "agentrl.session.name": row.name or row.metadata.get("name"),
        "agentrl.session.depth": row.depth,
        "agentrl.session.sample_index": row.sample_index,
        "agentrl.group.id": row.group_id,
        "agentrl.task.id": row.task_id,
        "agentrl.data_cursor": row.cursor,
        "agentrl.is_eval": row.is_eval,
    }


def _outcome(run: TracedRun, session: TracedSession) -> Json:
    row, calls = session.row, session.calls
    totals: Json = {}
    if calls is not None:
        totals = {
            "agentrl.prompt_tokens": calls.prompt_tokens,
            "agentrl.output_tokens": calls.output_tokens,
            "agentrl.weight_version.min": calls.min_version,
            "agentrl.weight_version.max": calls.max_version,
        }
    said = None if run.content_bytes is None or row.answer is None else text(row.answer, run.content_bytes)
    return {
        "agentrl.session.status": row.status,
        "agentrl.calls": 0 if calls is None else calls.count,
        **{name: None if value is None else int(value) for name, value in totals.items()},
        "agentrl.return": session.episode_return,
        "agentrl.trajectory.states": session.states,
        "agentrl.answer": said,
        **numbers("agentrl.reward.", session.rewards.get(None, {})),
        **numbers("agentrl.stats.", row.stats or {}),
    }
