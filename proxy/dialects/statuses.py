"""HTTP statuses and headers of errors, chosen by whether a client should send the request again.

    client                          retries                                   does not retry
    OpenAI's and Anthropic's SDKs   408, 409, 429, 5xx                        x-should-retry: false, with any status
    Codex                           everything else: 404, 409, 5xx, …         400, 429
    LiteLLM                         as its caller configures, by status       400 and 404 have their own error classes

A final error is therefore marked by the header. For Codex, whose only API is Responses, it is marked by its status.
"""

from __future__ import annotations

import math

from agentrl.errors import RequestError

_LATER = (408, 429)
_FINAL = ("engine_died",)
"""Codes of failures that the request itself may have caused."""


def is_final(error: RequestError) -> bool:
    """Whether the same request would fail again."""
    return error.code in _FINAL or (400 <= error.status < 500 and error.status not in _LATER)


def headers_of(error: RequestError) -> dict[str, str]:
    """The headers that say whether, and when, to send a request again."""
    found: dict[str, str] = {}
    if (
        error.retry_after_s is not None
    ):  # RFC 9110 has whole seconds; OpenAI's SDKs and agentrl.client read milliseconds
        found["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
        found["retry-after-ms"] = str(math.ceil(1000 * error.retry_after_s))
    if is_final(error):
        found["x-should-retry"] = "false"
    return found


def for_codex(error: RequestError) -> int:
    """An error's status in the Responses API: 401 for a wrong key, 400 for other final errors, 503 instead of 429."""
    if is_final(error):
        return 401 if error.status == 401 else 400
    return 503 if error.status == 429 else error.status
