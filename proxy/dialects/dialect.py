"""The protocol that each API implements: how it decodes requests and encodes answers.

body ──decode──► ModelRequest ──(sampled, committed)──► Answer ──encode──► body
                               └── deltas as generated ──► StreamEncoder ──► server-sent events
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from agentrl.errors import RequestError
from agentrl.proxy.dialects.model_answer import Answer, AnswerDelta, ResponseHeader
from agentrl.proxy.dialects.model_request import ModelRequest
from agentrl.proxy.dialects.upstream_event import UpstreamEvent


class StreamEncoder(Protocol):
    """Encodes one streamed response as the dialect's events. Every method returns the bytes to send, possibly none."""

    def start(self) -> bytes:
        """The events before the first delta."""
        ...

    def push(self, choice: int, part: AnswerDelta) -> bytes:
        """The events of a part of answer `choice`. Tool calls are pushed after the commit."""
        ...

    def finish(self, choice: int, answer: Answer) -> bytes:
        """The events that close an answer, after its commit and its last delta."""
        ...

    def end(self, answers: Sequence[Answer]) -> bytes:
        """The last events, after all answers are committed."""
        ...

    def error(self, error: RequestError) -> bytes:
        """The last events of a response that failed."""
        ...


class Dialect(Protocol):
    """One API. `name` is recorded with every call; `body` is the struct of a request's body."""

    name: str
    body: type[msgspec.Struct]

    def decode(self, body: bytes) -> ModelRequest:
        """Decode a request. Raises RequestError 400 that names the field at fault."""
        ...

    def encode(self, request: ModelRequest, header: ResponseHeader, answers: Sequence[Answer]) -> bytes:
        """The whole response. `answers` has one entry per choice of the request."""
        ...

    def stream(self, request: ModelRequest, header: ResponseHeader) -> StreamEncoder:
        """An encoder for the events of a streamed response."""
        ...

    def encode_error(self, error: RequestError) -> bytes:
        """The body of an error response."""
        ...

    def read_upstream(self, data: Any) -> UpstreamEvent:
        """Read an answer of an upstream: `data` is a whole answer, or the payload of an event."""
        ...

    def status(self, error: RequestError) -> int:
        """The HTTP status of an error for clients of this API."""
        ...
