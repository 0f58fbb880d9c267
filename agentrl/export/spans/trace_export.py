"""Sends the spans of sessions: reads sessions, makes their spans and batches them into requests of bounded size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from opentelemetry.sdk.trace import ReadableSpan

from agentrl.export.spans.call_spans import call_span
from agentrl.export.spans.otlp_sender import OtlpSender
from agentrl.export.spans.session_spans import TracedRun, session_span
from agentrl.store import Database
from agentrl.store.exports import trace_rows
from agentrl.store.exports.trace_rows import TracedSession

BATCH_SPANS = 256
BATCH_BYTES = 2_000_000
"""Text in the attributes of a batch; a single span may have more."""


class TraceExport:
    """Sends the spans of one run's sessions to one receiver."""

    def __init__(self, database: Database, run: TracedRun, sender: OtlpSender) -> None:
        self.sender = sender
        self._database = database
        self._run = run

    def send(self, session_ids: Sequence[str]) -> Iterator[list[str]]:
        """Send the spans of sessions; yields, after each request, the sessions whose spans were all sent.

        Raises EndpointDown: then the spans of later sessions were not sent, or only some of them.
        """
        batch: list[ReadableSpan] = []
        size, whole = 0, list[str]()
        for session in self._database.query(trace_rows.read, session_ids):
            for span in self._spans(session):
                batch.append(span)
                size += text_bytes(span)
                if len(batch) == BATCH_SPANS or size > BATCH_BYTES:
                    self.sender.send(batch)
                    if whole:
                        yield whole
                    batch, size, whole = [], 0, []
            whole.append(session.row.id)
        if batch:
            self.sender.send(batch)
        if whole:
            yield whole

    def _spans(self, session: TracedSession) -> Iterator[ReadableSpan]:
        yield session_span(self._run, session)
        contents = self._run.content_bytes is not None
        for call in trace_rows.calls(self._database, session.row.id, contents=contents):
            yield call_span(self._run, session, call)


def text_bytes(span: ReadableSpan) -> int:
    """About how many bytes the texts of a span's attributes have."""
    return sum(len(value) for value in (span.attributes or {}).values() if isinstance(value, str))
