"""A receiver of OTLP over HTTP: a real server that decodes what it gets, with answers that a test chooses."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from typing import Any

from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from agentrl.testing.server_thread import ServerThread

PATH = "/v1/traces"
KINDS = {1: "internal", 3: "client"}


class SpanReceiver:
    """Keeps every span that it takes. `refuse` gives the status of a request, by its spans; None: it is taken."""

    def __init__(self, port: int = 0) -> None:
        self.spans: list[dict[str, Any]] = []
        self.requests: list[dict[str, str]] = []  # their headers
        self.answers: list[tuple[int, bytes, dict[str, str]]] = []  # given once each, before anything is taken
        self.refuse: Any = lambda spans: None
        self.free = threading.Event()  # while it is clear, requests wait
        self.free.set()
        self._server = ServerThread(port)
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.port}{PATH}"

    def start(self) -> None:
        """Serve, on the port of the first start."""
        app = web.Application(client_max_size=1 << 26)
        app.router.add_post("/{path:.*}", self._take)
        self._server.start(app)

    def stop(self) -> None:
        self._server.stop()

    def __enter__(self) -> SpanReceiver:
        return self

    def __exit__(self, *_: object) -> None:
        self.free.set()
        self.stop()

    def counted(self) -> Counter[str]:
        """How many times each span was taken."""
        return Counter(span["span_id"] for span in self.spans)

    def named(self, prefix: str) -> list[dict[str, Any]]:
        return [span for span in self.spans if span["name"].startswith(prefix)]

    async def _take(self, request: web.Request) -> web.Response:
        body = await request.read()  # aiohttp has decompressed it
        self.requests.append({"path": request.path, **request.headers})
        await asyncio.to_thread(self.free.wait)
        if self.answers:
            status, said, headers = self.answers.pop(0)
            return web.Response(status=status, body=said, headers=headers)
        spans = decoded(body)
        if (status := self.refuse(spans)) is not None:
            return web.Response(status=status, text="refused")
        self.spans += spans
        return web.Response(content_type="application/x-protobuf")


def decoded(body: bytes) -> list[dict[str, Any]]:
    """The spans of a request: ids in hex, times in seconds, attributes as Python values."""
    found = []
    for of_resource in ExportTraceServiceRequest.FromString(body).resource_spans:
        resource = {one.key: _value(one.value) for one in of_resource.resource.attributes}
        for span in (span for scope in of_resource.scope_spans for span in scope.spans):
            found.append(
                {
                    "name": span.name,
                    "trace_id": span.trace_id.hex(),
                    "span_id": span.span_id.hex(),
                    "parent_id": span.parent_span_id.hex() or None,
                    "kind": KINDS[span.kind],
                    "start": span.start_time_unix_nano / 1e9,
                    "end": span.end_time_unix_nano / 1e9,
                    "error": span.status.message if span.status.code == 2 else None,
                    "resource": resource,
                    **{one.key: _value(one.value) for one in span.attributes},
                }
            )
    return found


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [_value(one) for one in value.array_value.values] if kind == "array_value" else getattr(value, kind)
