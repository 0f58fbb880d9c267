"""What the sender makes of a receiver's answers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanKind
from span_receiver import PATH, SpanReceiver

from agentrl.engine.server_process import free_port
from agentrl.export.spans.otlp_sender import MOST_TRIES, EndpointDown, OtlpSender
from agentrl.export.spans.span_parts import context, make_span
from agentrl.trace_endpoint import TraceEndpoint


def span(number: int) -> ReadableSpan:
    return make_span(
        f"span {number}",
        context(f"{1:032x}", str(number)),
        None,
        kind=SpanKind.CLIENT,
        times=(1.0, 2.0),
        attributes={},
        error=None,
        resource=Resource({}),
    )


@pytest.fixture
def sender(receiver: SpanReceiver) -> Iterator[OtlpSender]:
    made = OtlpSender(TraceEndpoint(url=receiver.url, timeout_s=5.0, headers={"x-key": "secret"}))
    yield made
    made.close()


def test_spans_arrive_compressed_with_the_headers(sender: OtlpSender, receiver: SpanReceiver) -> None:
    sender.send([span(i) for i in range(3)])
    assert [found["name"] for found in receiver.spans] == ["span 0", "span 1", "span 2"]
    (request,) = receiver.requests
    assert request["path"] == PATH
    assert (request["x-key"], request["Content-Encoding"]) == ("secret", "gzip")
    assert request["Content-Type"] == "application/x-protobuf"
    assert (sender.counts.sent, sender.counts.rejected) == (3, 0)


@pytest.mark.parametrize("status", [301, 401, 403, 404, 408, 429, 500, 502, 503])
def test_a_receiver_that_may_take_them_later_is_down(sender: OtlpSender, receiver: SpanReceiver, status: int) -> None:
    receiver.answers = [(status, b"wait\x1b[2J", {"retry-after": "7", "location": receiver.url})]
    with pytest.raises(EndpointDown, match=f"status {status}") as caught:
        sender.send([span(0), span(1)])
    assert caught.value.retry_after_s == 7.0
    assert receiver.spans == []
    assert sender.counts.sent == 0


@pytest.mark.parametrize("said", ["", "soon", "-5", "Wed, 21 Oct 2026 07:28:00 GMT", "9" * 400, "٣"])
def test_any_retry_after_is_read(sender: OtlpSender, receiver: SpanReceiver, said: str) -> None:
    receiver.answers = [(503, b"", {"retry-after": said})]
    with pytest.raises(EndpointDown) as caught:
        sender.send([span(0)])
    assert caught.value.retry_after_s == (300.0 if said.startswith("9") else 0.0)


def test_nobody_there_and_no_answer_in_time_is_down(receiver: SpanReceiver) -> None:
    for url in (f"http://127.0.0.1:{free_port()}{PATH}", receiver.url):
        receiver.free.clear()
        sender = OtlpSender(TraceEndpoint(url=url, timeout_s=0.2))
        with pytest.raises(EndpointDown):
            sender.send([span(0)])
        sender.close()


@pytest.mark.parametrize("status", [400, 413])
def test_only_rejected_spans_are_left_out(sender: OtlpSender, receiver: SpanReceiver, status: int) -> None:
    receiver.refuse = lambda spans: status if any(one["name"] == "span 5" for one in spans) else None
    sender.send([span(i) for i in range(16)])
    assert sorted(one["name"] for one in receiver.spans) == sorted(f"span {i}" for i in range(16) if i != 5)
    assert max(receiver.counted().values()) == 1
    assert (sender.counts.sent, sender.counts.rejected) == (15, 1)
    assert sender.counts.reason == f"status {status}: refused"


def test_a_receiver_that_rejects_everything_gets_few_requests(sender: OtlpSender, receiver: SpanReceiver) -> None:
    receiver.refuse = lambda spans: 400
    sender.send([span(i) for i in range(256)])
    assert len(receiver.requests) == MOST_TRIES
    assert (sender.counts.sent, sender.counts.rejected) == (0, 256)


def test_spans_that_a_taken_request_names_as_rejected_are_counted(sender: OtlpSender, receiver: SpanReceiver) -> None:
    said = ExportTraceServiceResponse()
    said.partial_success.rejected_spans, said.partial_success.error_message = 2, "too old"
    receiver.answers = [(200, said.SerializeToString(), {}), (200, b'{"no": "protobuf"}', {})]
    sender.send([span(i) for i in range(5)])
    assert (sender.counts.sent, sender.counts.rejected, sender.counts.reason) == (3, 2, "too old")
    sender.send([span(9)])
    assert sender.counts.sent == 4
