"""Statuses as clients read them: whether to send a request again.

    client                          sends again                               does not
    OpenAI's and Anthropic's SDKs   408, 409, 429, 5xx                        x-should-retry: false, whatever the status
    Codex                           everything else: 404, 409, 5xx, …         400, 429
    LiteLLM                         what its caller says; by status           400 and 404 are errors of their own

So a final error says so in the header, and to Codex, whose only API is Responses, by its status.
"""

from __future__ import annotations

import math

from agentrl.errors import RequestError

_LATER = (408, 429)
_FINAL = ("engine_died",)
"""Codes of failures behind which the request itself may be."""


def is_final(error: RequestError) -> bool:
    """Whether the same request would only fail again."""
    return error.code in _FINAL or (400 <= error.status < 500 and error.status not in _LATER)


def headers_of(error: RequestError) -> dict[str, str]:
    """The headers that say whether, and when, to send a request again."""
    found: dict[str, str] = {}
    if error.retry_after_s is not None:  # whole seconds by RFC 9110; OpenAI's SDKs and our client read the finer one
        found["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
        found["retry-after-ms"] = str(math.ceil(1000 * error.retry_after_s))
    if is_final(error):
        found["x-should-retry"] = "false"
    return found


def for_codex(error: RequestError) -> int:
    """The status of an error of the Responses API: 400 for final ones but a wrong key, 503 for `not now`."""
    if is_final(error):
        return 401 if error.status == 401 else 400
    return 503 if error.status == 429 else error.status
