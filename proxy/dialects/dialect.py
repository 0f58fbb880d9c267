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
    """One streamed response, in the dialect's event grammar. Every method returns bytes to send, perhaps none."""

    def start(self) -> bytes:
        """The events before the first delta."""
        ...

    def push(self, choice: int, part: AnswerDelta) -> bytes:
        """A part of an answer; tool calls come here too, after the commit."""
        ...

    def finish(self, choice: int, answer: Answer) -> bytes:
        """An answer is committed and all its deltas have been sent."""
        ...

    def end(self, answers: Sequence[Answer]) -> bytes:
        """All answers are committed; the last bytes."""
        ...

    def error(self, error: RequestError) -> bytes:
        """The response broke off; the last bytes."""
        ...


class Dialect(Protocol):
    """One API. `name` is recorded with every call; `body` is the shape of a request."""

    name: str
    body: type[msgspec.Struct]

    def decode(self, body: bytes) -> ModelRequest:
        """Read a request. Raises RequestError 400, naming what is wrong."""
        ...

    def encode(self, request: ModelRequest, header: ResponseHeader, answers: Sequence[Answer]) -> bytes:
        """The whole response; as many answers as the request has choices."""
        ...

    def stream(self, request: ModelRequest, header: ResponseHeader) -> StreamEncoder:
        """An encoder for the events of a streamed response."""
        ...

    def encode_error(self, error: RequestError) -> bytes:
        """The body of a response that is an error."""
        ...

    def read_upstream(self, data: Any) -> UpstreamEvent:
        """What the proxy acts on in another server's answer: `data` is a whole answer, or the payload of an event."""
        ...

    def status(self, error: RequestError) -> int:
        """The status that tells this API's clients of an error."""
        ...
