"""Reads a request's body within limits of size and time."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from starlette.requests import Request

from agentrl.errors import RequestError


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """How large a body may be, and how long it may take to arrive."""

    max_bytes: int
    timeout_s: float

    async def read(self, request: Request, most: int | None = None) -> bytes:
        """The request's body, of at most `most` bytes if that is below the limit.

        Raises RequestError: 413 when it or its announced size is too large, 408 when it is late, 499 when the client
        left.
        """
        max_bytes = min(self.max_bytes, most or self.max_bytes)
        announced = request.headers.get("content-length", "")
        if announced.isdecimal() and int(announced[:20]) > max_bytes:
            raise _too_large(max_bytes)
        size, parts = 0, []
        try:
            async with asyncio.timeout(self.timeout_s):
                while (message := await request.receive())["type"] == "http.request":
                    part: bytes = message.get("body", b"")
                    size += len(part)
                    if size > max_bytes:
                        raise _too_large(max_bytes)
                    parts.append(part)
                    if not message.get("more_body", False):
                        return b"".join(parts)
        except TimeoutError as error:
            late = f"the body was not here after {self.timeout_s:g} s"
            raise RequestError(408, late, code="body_timeout") from error
        raise RequestError(499, "the client disconnected", code="client_closed_request")


def _too_large(limit: int) -> RequestError:
    return RequestError(413, f"the body is larger than {limit} bytes", code="body_too_large")
