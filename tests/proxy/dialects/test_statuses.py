"""What tells clients whether to send a request again."""

import pytest

from agentrl.errors import RequestError
from agentrl.proxy.dialects import DIALECTS, of_request
from agentrl.proxy.dialects.statuses import headers_of, is_final

RESPONSES = DIALECTS["/v1/responses"]


@pytest.mark.parametrize(
    ("status", "code", "final", "to_codex"),
    [
        (400, "unsupported_parameter", True, 400),
        (401, "invalid_api_key", True, 401),
        (403, "session_limit_reached", True, 400),
        (404, "model_not_found", True, 400),
        (409, "session_sealed", True, 400),
        (413, "body_too_large", True, 400),
        (502, "engine_died", True, 400),
        (408, "body_timeout", False, 408),
        (429, "too_many_calls", False, 503),
        (500, "internal_error", False, 500),
        (502, "engine_error", False, 502),
        (503, "engine_unavailable", False, 503),
        (504, "deadline_exceeded", False, 504),
    ],
)
def test_a_final_error_says_so_by_header_and_to_codex_by_status(status, code, final, to_codex):
    error = RequestError(status, "why", code=code)
    assert is_final(error) is final
    assert headers_of(error) == ({"x-should-retry": "false"} if final else {})
    assert RESPONSES.status(error) == to_codex
    others = [dialect for dialect in DIALECTS.values() if dialect is not RESPONSES]
    assert {dialect.status(error) for dialect in others} == {status}


def test_a_retryable_error_has_retry_after_headers():
    error = RequestError(429, "why", code="too_many_calls", retry_after_s=0.2)
    assert headers_of(error) == {"retry-after": "1", "retry-after-ms": "200"}


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/v1/responses", "openai.responses"),
        ("/sessions/s/v1/responses", "openai.responses"),
        ("/responses", "openai.responses"),
        ("/completions", "openai.completions"),
        ("/v1/v1/messages", "anthropic.messages"),
        ("/v1/responses/resp_1", "openai.chat"),
        ("/sessions", "openai.chat"),
    ],
)
def test_an_error_is_in_the_dialect_of_its_path_with_or_without_version(path, name):
    assert of_request(path, {}).name == name
