"""Sends spans to a receiver of OTLP over HTTP, in its binary form, compressed.

    2xx                        taken; the answer may name spans that were rejected nevertheless
    400, 413, 415, 422         rejected: another try would be rejected too, so the spans are sent in halves
    all else, and no answer    the receiver is down, or its address or key is wrong: try again later

The exporter of OpenTelemetry counts a redirect as success and hides statuses, so only its encoder is used.
"""

from __future__ import annotations

import gzip
from collections.abc import Sequence
from dataclasses import dataclass

import httpx
from google.protobuf.message import DecodeError
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from opentelemetry.sdk.trace import ReadableSpan

from agentrl.errors import AgentRLError
from agentrl.trace_endpoint import TraceEndpoint

REJECTED = frozenset({400, 413, 415, 422})
HEADERS = {"content-type": "application/x-protobuf", "content-encoding": "gzip"}
LONGEST_ANSWER = 65536
LONGEST_REASON = 300
LONGEST_WAIT_S = 300.0
MOST_TRIES = 32
"""Maximum requests for one batch that is rejected; what is left counts as rejected."""


class EndpointDown(AgentRLError):
    """The receiver takes nothing now; `retry_after_s` is the wait that it asked for."""

    def __init__(self, message: str, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


@dataclass(slots=True)
class SpanCounts:
    """What became of the spans so far."""

    sent: int = 0
    rejected: int = 0
    reason: str = ""  # of the last rejection


class OtlpSender:
    """One connection to a receiver."""

    def __init__(self, endpoint: TraceEndpoint) -> None:
        self.endpoint = endpoint
        self.counts = SpanCounts()
        self._http = httpx.Client(timeout=endpoint.timeout_s, headers={**endpoint.headers, **HEADERS})

    def send(self, spans: Sequence[ReadableSpan]) -> None:
        """Send spans. Those that the receiver rejects are counted and left out. Raises EndpointDown."""
        waiting, tries = [list(spans)], 0
        while waiting:
            batch = waiting.pop()
            if tries == MOST_TRIES:
                self.counts.rejected += len(batch)
                continue
            tries += 1
            reason = self._post(batch)
            if reason is None:
                self.counts.sent += len(batch)
            elif len(batch) == 1:
                self.counts.rejected += 1
                self.counts.reason = reason
            else:
                half = len(batch) // 2
                waiting += [batch[half:], batch[:half]]

    def close(self) -> None:
        """Close the connection."""
        self._http.close()

    def _post(self, spans: Sequence[ReadableSpan]) -> str | None:
        """Send one request; returns why the receiver rejected it, or None. Raises EndpointDown."""
        body = gzip.compress(encode_spans(spans).SerializeToString(), compresslevel=3)
        try:
            with self._http.stream("POST", self.endpoint.url, content=body) as answer:
                said = _beginning(answer)
        except httpx.HTTPError as error:
            raise EndpointDown(f"{type(error).__name__}: {error}"[:LONGEST_REASON]) from error
        status = answer.status_code
        if 200 <= status < 300:
            self._read_partial(said)
            return None
        reason = f"status {status}: {said.decode(errors='replace')}"[:LONGEST_REASON]
        if status in REJECTED:
            return reason
        raise EndpointDown(reason, _retry_after_s(answer))

    def _read_partial(self, said: bytes) -> None:
        """Count the spans that the receiver rejected although it took the request."""
        try:
            partial = ExportTraceServiceResponse.FromString(said).partial_success
        except DecodeError:  # another receiver's answer, for example JSON
            return
        if partial.rejected_spans > 0:
            self.counts.sent -= partial.rejected_spans
            self.counts.rejected += partial.rejected_spans
            self.counts.reason = partial.error_message[:LONGEST_REASON]


def _beginning(answer: httpx.Response) -> bytes:
    """The beginning of an answer's body."""
    said = b""
    for piece in answer.iter_bytes():
        said += piece
        if len(said) > LONGEST_ANSWER:
            break
    return said[:LONGEST_ANSWER]


def _retry_after_s(answer: httpx.Response) -> float:
    """The wait that an answer asks for in seconds; a date counts as none."""
    asked = answer.headers.get("retry-after", "").strip()
    return min(float(asked), LONGEST_WAIT_S) if asked.isascii() and asked.isdecimal() else 0.0
