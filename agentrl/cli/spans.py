"""`agentrl spans`: sends OpenTelemetry spans of a run's sessions and calls."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentrl.cli.located import DatabaseUrl, Run, Store, opened
from agentrl.errors import UserError
from agentrl.visible import log_to_stderr, say

if TYPE_CHECKING:
    from agentrl.configs.metrics_config import TracesConfig
    from agentrl.export.spans.trace_export import TraceExport


def spans(
    run: Run = None,
    database_url: DatabaseUrl = None,
    endpoint: Annotated[
        str | None,
        typer.Option(help="URL that takes OTLP over HTTP; default: metrics.traces.endpoint.", show_default=False),
    ] = None,
    headers_env: Annotated[
        str | None,
        typer.Option(
            help="Environment variable with headers, NAME=VALUE,NAME=VALUE; default: metrics.traces.headers_env.",
            show_default=False,
        ),
    ] = None,
    contents: Annotated[
        bool | None,
        typer.Option("--contents/--no-contents", help="Send messages and answers; default: metrics.traces.contents."),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", help="Send the sessions that wait, and go on until stopped.")
    ] = False,
) -> None:
    """Send the spans of all ended sessions of a run to a receiver of OpenTelemetry traces.

    A span that is sent twice has the same id. With --follow, only sessions that ended under `metrics.traces` and were
    not sent yet; a proxy does this by itself.
    """
    with opened(run, database_url) as store:
        found = store.run()
        settings = _settings(found.config, endpoint, headers_env, contents)
        if follow:
            _follow(store, found, settings)
        else:
            _send_all(store, found, settings)


def _settings(
    config: dict[str, Any], endpoint: str | None, headers_env: str | None, contents: bool | None
) -> TracesConfig:
    """The run's settings, replaced by the options. Raises UserError without an endpoint, and for an unusable one."""
    from pydantic import ValidationError

    from agentrl.configs.metrics_config import TracesConfig

    given = {"endpoint": endpoint, "headers_env": headers_env, "contents": contents}
    asked = {name: value for name, value in given.items() if value is not None}
    stored = (config.get("metrics") or {}).get("traces") or {}
    if endpoint is not None and headers_env is None:
        stored = {name: value for name, value in stored.items() if name != "headers_env"}  # the key of another receiver
    settings = stored | asked
    if "endpoint" not in settings:
        raise UserError("the run has no metrics.traces: give --endpoint")
    try:
        return TracesConfig.model_validate(settings)
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(f"--{str(first['loc'][0]).replace('_', '-')}: {first['msg']}") from None


def _export(store: Store, run: Any, settings: TracesConfig) -> TraceExport:
    """Raises ConfigError for a missing package and for missing headers."""
    from agentrl.trace_endpoint import endpoint_of

    endpoint = endpoint_of(settings, os.environ)

    from agentrl.export.spans.otlp_sender import OtlpSender
    from agentrl.export.spans.session_spans import TracedRun
    from agentrl.export.spans.trace_export import TraceExport

    return TraceExport(store.database, TracedRun.of(run, settings), OtlpSender(endpoint))


def _send_all(store: Store, run: Any, settings: TracesConfig) -> None:
    export = _export(store, run, settings)

    from agentrl.cli.progress_bar import bar
    from agentrl.export.spans.otlp_sender import EndpointDown
    from agentrl.store.exports import trace_rows
    from agentrl.store.sessions.ends import trace_outbox

    total, done = store.database.query(trace_rows.count, run.id), 0
    try:
        with bar("sending spans") as progress:
            for page in trace_rows.pages(store.database, run.id):
                for sent in export.send(page):
                    store.database.transact(trace_outbox.sent, sent)
                    done += len(sent)
                    progress(done, max(total, done))
    except EndpointDown as error:
        raise UserError(f"{settings.endpoint} takes no spans: {error} ({done:,} of {total:,} sessions sent)") from error
    finally:
        export.sender.close()
    counts = export.sender.counts
    if counts.rejected:
        say(f"{counts.rejected:,} spans were rejected: {counts.reason}", err=True)
    say(f"{done:,} sessions, {counts.sent:,} spans: {settings.endpoint}")


def _follow(store: Store, run: Any, settings: TracesConfig) -> None:
    import signal
    import threading

    export = _export(store, run, settings)

    from agentrl.export.spans.span_follower import SpanFollower

    log_to_stderr("warning")
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    SpanFollower(store.database, run.id, export, stop).run()
    export.sender.close()
